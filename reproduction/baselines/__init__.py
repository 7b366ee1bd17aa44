"""The paper's rules, Steady and every baseline under constant, random, changing and data-dependent delays.

Each rule is tuned twice: at delay 0 and then frozen (the headline), and anew for every kind of delay (the oracle).
Tuning looks at the training loss; the test accuracy is only reported.
"""

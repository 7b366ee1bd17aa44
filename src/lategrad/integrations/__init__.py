"""Callbacks for other trainers. Each module needs its library: ``pip install 'lategrad[integrations]'``."""

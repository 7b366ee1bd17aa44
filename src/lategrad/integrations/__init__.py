"""Callbacks for other people's trainers. Each module needs its library: ``pip install 'lategrad[integrations]'``."""

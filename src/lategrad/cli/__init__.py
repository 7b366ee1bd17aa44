"""The commands, a file each; ``options``, ``build`` and ``results`` are what they share."""

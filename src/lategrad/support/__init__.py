"""Small things that every layer uses: checks of arguments, trees of tensors, whole files, threads."""

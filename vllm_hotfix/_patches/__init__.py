"""One module per patch, named like the patch: what is wrong upstream, the patch as data, its wrappers."""

"""Walkthroughs of minidist, one idea each, to be read and run from top to bottom.

In a checkout: `python tutorials/01_tensors.py`. Installed with pip, the folder is
called minidist_tutorials: `python -m minidist_tutorials.01_tensors`.
"""

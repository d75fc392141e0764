"""The base of everything else: settings, lines on stderr, wrapping, errors, answers.

This package imports no other package of the shim.
"""

"""Execution of transfer plugins as condor_starter runs them, for daemons that deliver files."""

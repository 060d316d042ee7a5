"""Running of transfer plugins, as condor_starter runs them, by daemons that have files to deliver."""

"""Import AReaL's YAML files as configs of rlx."""

"""The views: each module has one function that makes the content of a page out of the state. Pure."""

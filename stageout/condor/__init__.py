"""HTCondor as the product uses it, and the only importer of its Python bindings, which are loaded when first needed."""

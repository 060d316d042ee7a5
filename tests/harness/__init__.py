"""The surroundings of tests, benchmarks and the demonstration: real pools, servers, networks, and an emulated Globus.

No part of the product. It is imported from a checkout or the unpacked sdist, and runs the product that is installed.
"""

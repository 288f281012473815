"""The drop-in cache.

Reading order: debug, storage, ranks, layout, request, slots, layer, indexed, states, allocation,
identity, fileformat, filepieces, files, hybrid, sequences, cache, prefixes, pool.
"""

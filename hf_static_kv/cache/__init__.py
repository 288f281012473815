"""The drop-in cache.

Reading order: debug, storage, ranks, layout, request, slots, layer, indexed,
states, passes, allocation, identity, fileidentity, fileformat, filepieces,
files, cache, prefixes, pool.
"""

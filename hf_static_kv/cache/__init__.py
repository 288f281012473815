"""The drop-in cache.

Reading order: debug, storage, layout, request, layer, allocation, identity, fileformat, filepieces, files, cache,
prefixes, pool.
"""

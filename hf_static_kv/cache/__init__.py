"""The drop-in cache. Reading order: debug, storage, support, layout, request, layer, callers, allocation, cache."""

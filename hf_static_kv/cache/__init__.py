"""The drop-in cache. Files in reading order: debug, storage, support, layout, layer, request, callers, allocation, cache."""

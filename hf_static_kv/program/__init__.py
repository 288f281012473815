"""The captured decode step, and the fusions (linears, norms, rotary) that make it fast without a
compiler.

There is no list of models: a module is fused when it gives the same bits as the plain fusion on
random inputs.
"""

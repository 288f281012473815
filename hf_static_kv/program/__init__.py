"""The captured decode step, and the fusions that make it fast without a compiler.

    norms      each RMS norm as one kernel; a sum and the norms before and after it as one kernel
    rotary     cosines and sines of all positions in a table, computed once; queries and keys rotated by one kernel
    linears    few tokens at a time; gate, up, activation and product as one kernel; q, k, v in one launch

There is no list of models: a module is fused when it gives the same bits as the plain fusion on random inputs.
"""

"""Fewer and better kernels in a captured step, without a compiler: parts of a model replaced for a while.

    norms      each RMS norm as one kernel; a sum and the norms around it as one
    positions  cosines and sines of all positions in a table, made once; queries and keys turned in one kernel
    linears    read by our own kernel; gate, up, activation and product in one; q, k, v in one launch

No list of models: a part is taken for one of these when, tried on random numbers, it computes the same to the bit.
"""

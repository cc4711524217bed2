"""Who takes part, as functions over arrays: indices, sizes, scores, update vectors and a seed, nothing of federation.

A selector returns distinct client indices in ascending order, exactly min(k, number available) of them. `available`
is a mask over all known clients or an array of their indices in any order: not everyone is there every time.
"""

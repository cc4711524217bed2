"""Client selection as functions over arrays: sizes, scores, update vectors and a seed, without server or clients.

A selector returns distinct client indices in ascending order, exactly min(k, number of available clients) of them.
`available` is a mask over all known clients or an array of their indices in any order, because not every client is
present in every round. The stages in `shoal.stages` apply selectors to the clients of a run.
"""

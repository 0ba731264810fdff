"""Grids of simulations with repeated seeds, from one file to tables and pictures: `jaxserve study`.

spec      the file, and the points of its grid
point     one point with one seed: a world, a trace, its figures; or the highest rate that meets the targets
figures   what the figures of a run are: warm-up left out, fairness, quality of experience, intervals
sources   digests of the code and the files that a run depends on
run       all points over processes; what an earlier call has finished is not run again
summary   points over their seeds, and differences seed by seed
report    the frame of runs, the tables of points and differences
pictures  lines with bands, throughput against late tokens, distributions, differences
"""

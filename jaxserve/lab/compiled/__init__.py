"""Compiled steps of the engine, for chips that need not be here, and facts read from their programs.

`topology` names devices that are absent and `ahead` compiles for them; `hlo` parses the program, `collectives` counts
what the devices send each other, `traffic` what a step reads and writes. The planner, tests and scripts use these; no
step does.
"""

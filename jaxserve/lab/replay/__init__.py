"""Tools for step logs: run one again, or show where its time went.

How the package is cut:

    check     whether a plan may be given to a device at all
    core      plans in, tokens out, compared: any runner, no JAX
    command   `jaxserve replay`
    summary   `jaxserve steps`: a log as a table

A replay needs no scheduler, no text and no clock: a plan holds all that a device is told. So it separates two kinds of
defects that look the same from outside. Tokens that change in a replay were changed by the device's side; tokens
that stay wrong were planned wrong.
"""

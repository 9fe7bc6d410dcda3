"""Costs of calls on the machine that this was written on, for those who have not measured theirs."""

from __future__ import annotations

from recinfer.sizing.costs import EndCosts, FanCosts, RunCosts, ServingCosts

__all__ = ["TYPICAL_COSTS"]

TYPICAL_COSTS = ServingCosts(
    server=EndCosts(
        io_byte_s=0.0,
        io_cold_s=0.0001023,
        io_s=5.376e-05,
        loop_byte_s=8.405e-10,
        loop_cold_s=0.0002148,
        loop_s=0.0001242,
    ),
    client=EndCosts(
        io_byte_s=3.951e-10,
        io_cold_s=9.852e-05,
        io_s=2.612e-05,
        loop_byte_s=4.436e-10,
        loop_cold_s=0.0001369,
        loop_s=6.045e-05,
    ),
    run=RunCosts(
        base_s=0.0002645,
        byte_s=1.235e-09,
        request_s=2.838e-05,
    ),
    shard=RunCosts(
        base_s=0.0002549,
        byte_s=2.503e-10,
        request_s=0.0,
    ),
    fan=FanCosts(
        byte_s=0.0,
        call_s=8.587e-05,
        run_s=3.977e-05,
    ),
    wire_s=0.0001487,
    spread=(
        0.655,
        0.690,
        0.719,
        0.746,
        0.763,
        0.776,
        0.793,
        0.815,
        0.841,
        0.881,
        0.930,
        0.956,
        0.971,
        0.981,
        0.991,
        0.998,
        1.008,
        1.015,
        1.021,
        1.028,
        1.033,
        1.038,
        1.043,
        1.049,
        1.054,
        1.060,
        1.065,
        1.070,
        1.076,
        1.082,
        1.087,
        1.093,
        1.100,
        1.106,
        1.116,
        1.125,
        1.138,
        1.155,
        1.203,
        1.728,
    ),
    stalls_per_s=0.4758,
    stall_s=(0.002453,),
    notes={"machine": "two cores of a virtual machine, 2026-11-21"},
)
"""Measured by ``recinfer calibrate --serving`` on two cores of a virtual machine; look at the order of magnitude only."""

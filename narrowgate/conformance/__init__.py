"""The suite that ships: cases as data, comparers, guards, a runner.

It needs no pytest; tests and benchmarks use the same cases."""

"""The compiled cases. A file by itself, so that it is tested beside the others."""

from __future__ import annotations


def test_cases_pass(cases, run_cases):
    run_cases(cases)

"""Tests of the exchange family: the protocol on paper, then each transport."""

"""Counters of reads."""

from __future__ import annotations

import threading

import pytest

from moet.tiers.readstats import Histogram, Meter


def test_histograms_count_by_powers_of_two() -> None:
    assert Histogram().quantile(0.5) == 0
    buckets = [Histogram.bucket(s) for s in (0, 0.9e-6, 1e-6, 2e-6, 1023e-6, 1024e-6, 1e9)]
    assert buckets == [0, 0, 1, 2, 10, 11, 31]
    counts = [0] * 32
    counts[10], counts[14] = 9, 1
    histogram = Histogram(tuple(counts))
    assert histogram.total == 10
    assert histogram.quantile(0.5) == pytest.approx(1.024e-3)
    assert histogram.quantile(1.0) == pytest.approx(16.384e-3)


def test_a_meter_adds_up_and_tells_when_nothing_is_in_flight() -> None:
    meter = Meter(records=3)
    meter.add(in_flight=2, nbytes_read=10, queue_s=0.5)
    waiter = threading.Thread(target=meter.wait_idle)
    waiter.start()
    meter.delivered(7, 0.001)
    assert waiter.is_alive()
    meter.add(failures=1, in_flight=-1)
    waiter.join(60)
    assert not waiter.is_alive()
    stats = meter.read()
    assert (stats.records, stats.reads, stats.failures, stats.in_flight) == (3, 1, 1, 0)
    assert (stats.nbytes, stats.nbytes_read, stats.queue_s) == (7, 10, 0.5)
    assert stats.latency.total == 1

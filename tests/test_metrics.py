"""metrics.py: what Prometheus reads."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cachefs import metrics
from cachefs.errors import InvalidError
from cachefs.formats.records import State
from cachefs.metrics import Metrics


def samples(registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_metric_is_exported_with_its_help_and_listed_in_the_table():
    made = Metrics()
    exported = {
        family.name: family
        for family in text_string_to_metric_families(generate_latest(made.registry).decode())
        if family.name.startswith("cachefs_")
    }
    listed = {row.name.removesuffix("_total"): row for row in made.rows}
    assert exported.keys() == listed.keys()
    for name, family in exported.items():
        assert family.documentation == listed[name].help
        assert family.type == listed[name].kind
        assert (family.type == "counter") == listed[name].name.endswith("_total")


@pytest.mark.parametrize(("words", "unit"), [({"bytes"}, "bytes"), ({"age", "time", "late"}, "seconds")])
def test_names_carry_their_unit(words, unit):
    measured = [row.name for row in Metrics().rows if words & set(row.help.lower().split()[:2])]
    assert len(measured) >= 3
    assert all(name.removesuffix("_total").endswith(f"_{unit}") for name in measured)


def test_states_and_results_start_at_zero_so_that_rates_work_from_the_first_event():
    found = samples(Metrics().registry)
    assert {labels[0][1] for (name, labels) in found if name == "cachefs_generations"} == {
        state.value for state in State
    }


def test_two_daemons_in_one_process_do_not_share_a_counter():
    one, other = Metrics(), Metrics()
    one.upload_retries.labels(reason="5xx").inc()
    assert samples(one.registry)["cachefs_upload_retries_total", (("reason", "5xx"),)] == 1
    assert ("cachefs_upload_retries_total", (("reason", "5xx"),)) not in samples(other.registry)


def test_exactly_one_data_path_is_in_use():
    made = Metrics()
    for mode in ("kernel", "python"):
        made.set_data_path(mode)
        found = {key[1][0][1]: value for key, value in samples(made.registry).items() if key[0] == "cachefs_data_path"}
        assert found == {"kernel": float(mode == "kernel"), "python": float(mode == "python")}
    with pytest.raises(ValueError, match="unknown data path 'fast'"):
        made.set_data_path("fast")


def test_the_endpoint_answers_until_it_is_closed_and_then_frees_its_port():
    made = Metrics()
    made.backlog_bytes.set(12345)
    server = metrics.serve(("127.0.0.1", 0), made.registry)
    host, port = server.address
    assert host == "127.0.0.1"
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        assert b"cachefs_backlog_bytes 12345.0\n" in answer.read()
    server.close()
    server.close()
    with socket.socket() as sock:
        assert sock.connect_ex((host, port)) != 0


def test_a_busy_port_is_a_configuration_error_that_names_it():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(InvalidError, match=rf"metrics = '127.0.0.1:{port}': Address already in use") as caught:
            metrics.serve(("127.0.0.1", port), Metrics().registry)
    assert "off" in caught.value.hint


def test_the_readme_lists_every_metric(readme_table):
    assert readme_table("metrics") in (None, metrics.table(Metrics().rows))

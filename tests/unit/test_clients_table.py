"""The works-with tables of docs/clients.md."""

import pytest

from tests.clients.environments import HERE, load_clients
from tests.clients.table import CHECKS, Row, merge

PAGE = "# Clients\n\n<!-- table: client -->\n<!-- end: client -->\n\nafter\n"


def row(title, version="1", **outcomes):
    return Row(title, version, "chat", outcomes)


def test_rows_of_a_client_replace_its_earlier_ones_and_others_stay():
    page = merge(PAGE, "client", [row("one", plain=False), row("two", plain=True)], ["one", "two"])
    page = merge(page, "client", [row("one", "2", **dict.fromkeys(CHECKS, True))], ["one", "two"])
    assert page.splitlines()[5:7] == [
        f"| one | 2 | chat |{' yes |' * len(CHECKS)}",
        f"| two | 1 | chat | yes |{' **no** |' * (len(CHECKS) - 1)}",
    ]
    assert page.endswith("<!-- end: client -->\n\nafter\n")


def test_rows_stand_in_the_order_of_the_clients():
    page = merge(PAGE, "client", [row("two"), row("one")], ["one", "two"])
    assert page.index("| one |") < page.index("| two |")


def test_a_check_that_a_client_cannot_do_is_a_dash():
    assert row("one", plain=None).cells("client")[3] == "-"


def test_a_page_without_the_table_is_refused():
    with pytest.raises(ValueError, match="lacks"):
        merge("", "client", [], [])


def test_every_client_is_pinned_and_has_its_script():
    for client in load_clients().values():
        assert (HERE / "scripts" / client.script).is_file()
        assert any(mark in client.pins[0] for mark in ("==", "@")), client.name
        assert client.version[0].isdigit(), client.name

"""Who may talk to whom: real certificates, real handshakes, and errors that say what to do."""

import asyncio
import dataclasses
import datetime
import os
import shutil

import pytest
import trustme

from rlx.base import UserError
from rlx.engines.server import Server
from rlx.fleet import tls
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling
from rlx.fleet.tls import Tls

PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


def write(authority, path, *names, **options):
    """A certificate for `names` and its key, as two PEM files."""
    made = authority.issue_cert(*names, **options)
    path.with_suffix(".crt").write_bytes(b"".join(c.bytes() for c in made.cert_chain_pems))
    path.with_suffix(".key").write_bytes(made.private_key_pem.bytes())


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """Gives Tls(cert, key, ca) by the names of files made once: ours, theirs, old, elsewhere."""
    room = tmp_path_factory.mktemp("pem")
    ours, theirs = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(room / "ours.pem")
    theirs.cert_pem.write_to_path(room / "theirs.pem")
    write(ours, room / "ours", "127.0.0.1")
    write(theirs, room / "theirs", "127.0.0.1")
    write(ours, room / "elsewhere", "example.org")
    ended = PAST + datetime.timedelta(days=9)
    write(ours, room / "old", "127.0.0.1", not_before=PAST, not_after=ended)
    (room / "junk.pem").write_text("no certificate")

    def files(cert="", ca="", key=""):
        pair = (room / f"{cert}.crt", room / f"{key or cert}.key") if cert else ("", "")
        return Tls(*map(str, pair), str(room / f"{ca}.pem") if ca else "")

    return files


async def talk(tools, server_tls, client_tls, token=None, limits=None):
    """One completion by a fleet of one server."""
    async with tools.server(tls=server_tls, token="sesame") as (_, server):
        fleet = Fleet(
            [f"127.0.0.1:{server.port}"], token=token or "sesame", tls=client_tls,
            limits=limits or tools.limits,
        )  # fmt: skip
        try:
            await fleet.connect()
            return await fleet.generate([1, 2], Sampling(seed=3, max_new_tokens=9), 1)
        finally:
            await fleet.close()


@pytest.mark.parametrize(
    ("server", "client"),
    [(("ours",), ("", "ours")), (("ours", "ours"), ("ours", "ours")), (None, None)],
    ids=["one-sided", "mutual", "plain"],
)
def test_tokens_come_over_tls(tools, arithmetic, pem, server, client):
    one, other = (pem(*names) if names else None for names in (server, client))
    done = tools.run(talk(tools, one, other))
    assert done[0].tokens.tolist() == arithmetic.completion(3, 0, 9)


@pytest.mark.parametrize(
    ("server", "client", "words"),
    [
        (("ours",), ("", "theirs"), "unable to get local issuer.*set fleet.tls.ca"),
        (("elsewhere",), ("", "ours"), "Hostname Verification Check failed.; use a name"),
        (("old",), ("", "ours"), "certificate has expired"),
        (None, ("", "ours"), "does not speak TLS"),
    ],
    ids=["wrong CA", "wrong host", "expired", "plain server"],
)
def test_a_server_that_cannot_be_trusted_is_refused_at_once(tools, pem, server, client, words):
    one, other = (pem(*names) if names else None for names in (server, client))
    with pytest.raises(UserError, match=words) as caught:
        tools.run(talk(tools, one, other), seconds=tools.limits.connect_seconds / 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("server", "client"),
    [
        (("ours", "ours"), ("", "ours")), (("ours", "ours"), ("theirs", "ours")),
        (("ours", "ours"), ("old", "ours")), (("ours",), None), (("ours", "ours"), None),
    ],
    ids=[
        "no client certificate", "wrong client certificate", "expired client certificate",
        "plain client", "plain client of a mutual server",
    ],
)  # fmt: skip
def test_a_client_that_is_not_trusted_is_hung_up_on(tools, pem, server, client):
    one, other = (pem(*names) if names else None for names in (server, client))
    limits = dataclasses.replace(tools.limits, connect_seconds=1.0)
    words = "no rollout server answered.*Socket closed; if it asks for TLS.*set fleet.tls"
    with pytest.raises(UserError, match=words):
        tools.run(talk(tools, one, other, limits=limits))


def test_the_token_is_asked_for_inside_tls(tools, pem):
    with pytest.raises(UserError, match="bearer token"):
        tools.run(talk(tools, pem("ours"), pem("", "ours"), token="open"))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("none",), "cannot read .*none.crt: No such file"),
        (("ours", "", "theirs"), "KEY_VALUES_MISMATCH.*belong together"),
        (("ours", "none"), "cannot read .*none.pem"),
        (("ours", "junk"), "has no certificate"),
    ],
    ids=["missing", "mismatched", "missing CA", "junk CA"],
)
def test_files_that_cannot_work_are_found_on_both_sides(pem, names, words):
    with pytest.raises(UserError, match=words):
        Server(lambda: None, tls=pem(*names))
    cert, ca, key = (*names, "", "")[:3]
    with pytest.raises(UserError, match=words):
        tls.channel("127.0.0.1:1", pem(cert, ca or "ours", key))


def test_half_a_pair_is_refused():
    assert tls.server_tls("", "", "") is tls.client_tls("", "", "") is None
    for arguments in (("c", "", ""), ("", "k", ""), ("", "", "a")):
        with pytest.raises(UserError, match="needs a certificate and its key"):
            tls.server_tls(*arguments)
    for arguments in (("", "c", "k"), ("a", "c", ""), ("a", "", "k")):
        with pytest.raises(UserError, match="need each other"):
            tls.client_tls(*arguments)


def test_beyond_loopback_there_are_both_a_token_and_tls(pem):
    for host in ("127.0.0.1", "127.0.0.2", "localhost", "::1"):
        tls.check_host(host, None, None)
    for host in ("0.0.0.0", "::", "10.0.0.1", "node7", ""):
        tls.check_host(host, "sesame", pem("ours"))
        for token, files in (("sesame", None), (None, pem("ours")), ("", None)):
            with pytest.raises(UserError, match="beyond this machine"):
                tls.check_host(host, token, files)
    with pytest.raises(UserError, match="token"):
        Server(lambda: None, host="0.0.0.0")


def test_a_token_leaves_this_machine_only_inside_tls(pem):
    for address in ("node7:80", "10.0.0.1:80", "[2001:db8::1]:80", "ipv4:127.0.0.1:1,10.0.0.1:1"):
        with pytest.raises(UserError, match="unencrypted"):
            Fleet([address], token="sesame")
        tls.check_address(address, None, None)
        tls.check_address(address, "sesame", pem("", "ours"))
    for address in ("localhost:80", "[::1]:80", f"127.0.0.1:{os.getpid()}"):
        tls.check_address(address, "sesame", None)


@pytest.mark.parametrize(
    ("servers", "client", "copies"),
    [
        (("ours",), ("", "ours"), 1),
        (("ours", "ours"), ("ours", "ours"), 1),  # who calls a server shows a certificate
        (("theirs", "ours"), ("ours", "theirs"), 3),  # which the servers do not have
    ],
)
def test_servers_send_weights_to_each_other_by_the_same_rules(
    tools, tmp_path, pem, servers, client, copies
):
    async def main():
        options = {"tls": pem(*servers), "token": "sesame", "stage_dir": str(tmp_path)}
        async with (
            tools.server(**options) as (a, one),
            tools.server(**options) as (b, two),
            tools.server(**options) as (c, three),
        ):
            fleet = Fleet(
                [f"127.0.0.1:{server.port}" for server in (one, two, three)], token="sesame",
                tls=pem(*client), publish_dir=str(tmp_path),
                limits=dataclasses.replace(tools.limits, relay_fanout=1),
            )  # fmt: skip
            try:
                await fleet.connect()
                report = await fleet.publish(1, tools.weights(0.5), "stream")
                assert report.sent_bytes == copies * report.num_bytes
                assert len(report.acks) == 3
                assert [engine.version for engine in (a, b, c)] == [1, 1, 1]
            finally:
                await fleet.close()

    tools.run(main())


@pytest.mark.parametrize("method", ["stream", "delta"])
def test_files_that_are_being_replaced_do_not_end_a_publish(tools, pem, tmp_path, method):
    """Relays, and the file for a server that comes back, name the CA that was read at the start."""
    ca = shutil.copy(pem("", "ours").ca, tmp_path / "ca.pem")

    async def main():
        options = {"tls": pem("ours", "ours"), "token": "sesame", "stage_dir": str(tmp_path)}
        tls = dataclasses.replace(pem("ours", "ours"), ca=str(ca))
        async with tools.server(**options) as (_, one), tools.server(**options) as (_, two):
            addresses = [f"127.0.0.1:{server.port}" for server in (one, two)]
            fleet = Fleet(addresses, token="sesame", tls=tls, publish_dir=str(tmp_path),
                          limits=dataclasses.replace(tools.limits, relay_fanout=1))  # fmt: skip
            try:
                await fleet.connect()
                ca.unlink()
                for version in (1, 2):
                    report = await fleet.publish(version, tools.weights(0.5 * version), method)
                    assert len(report.acks) == 2
            finally:
                await fleet.close()

    tools.run(main())


def test_files_that_are_being_replaced_are_read_again(tools, pem, tmp_path):
    """A server that was lost in that moment was never tried again."""
    ca = tmp_path / "ca.pem"

    async def main():
        async with tools.server(tls=pem("ours"), token="sesame") as (_, server):
            address = f"127.0.0.1:{server.port}"
            fleet = Fleet([address], token="sesame", tls=Tls(ca=str(ca)), limits=tools.limits)
            try:
                with pytest.raises(UserError, match="cannot read"):  # at once at the start
                    await asyncio.wait_for(fleet.connect(), tools.limits.connect_seconds / 2)
                shutil.copy(pem("", "ours").ca, ca)
                await fleet.connect()
                ca.unlink()
                fleet._members[0].fail("a test says so")
                while "cannot read" not in fleet.states()[address]:
                    await asyncio.sleep(0.01)
                shutil.copy(pem("", "ours").ca, ca)
                while not fleet.live:
                    await asyncio.sleep(0.01)
            finally:
                await fleet.close()

    tools.run(main())

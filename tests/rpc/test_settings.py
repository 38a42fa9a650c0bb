"""The edge's limits come from the configuration, and are the documented ones without it."""

from __future__ import annotations

from attrs import evolve

from pushd.app import rpc_settings
from pushd.config import Config
from pushd.rpc.settings import RpcSettings


def test_without_a_configuration_the_limits_are_the_defaults() -> None:
    assert rpc_settings(Config()) == RpcSettings()


def test_every_limit_with_a_key_follows_it() -> None:
    config = Config()
    server = evolve(
        config.server,
        max_header_list_bytes=2_000,
        max_connections=7,
        max_connection_receive_bytes=70_000,
        max_receive_bytes=80_000,
        max_handshake_duration_ms=1_500,
        max_idle_duration_ms=2_500,
        request_logger=False,
    )
    limits = evolve(config.limits, max_http2_streams=3, max_request_bytes=4_000, max_response_bytes=5_000)
    assert rpc_settings(evolve(config, server=server, limits=limits)) == RpcSettings(
        max_concurrent_streams=3,
        max_request_bytes=4_000,
        max_response_bytes=5_000,
        max_header_list_bytes=2_000,
        max_connections=7,
        connection_receive_bytes=70_000,
        receive_bytes=80_000,
        handshake_s=1.5,
        idle_s=2.5,
        log_calls=False,
    )

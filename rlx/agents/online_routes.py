"""HTTP routes for sessions of outside applications; docs/online.md lists their status codes.

admin key     POST, GET /v1/sessions; GET /v1/sessions/ID/trajectories
session key   POST /v1/rewards, /v1/session/end, /v1/session/refresh
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from rlx.agents import dialects, returns
from rlx.agents.dialects import ApiError
from rlx.agents.online import OnlineSessions, public_view
from rlx.agents.session_state import SessionState

_Handler = Callable[[OnlineSessions, web.Request], Awaitable[web.Response]]


def add(router: web.UrlDispatcher, prefix: str, online: OnlineSessions) -> None:
    """Add the routes below a prefix; those of admins take no key in the address."""
    for (method, path), handler in (_OF_SESSIONS if "{key}" in prefix else _ROUTES).items():
        router.add_route(method, prefix + path, partial(handler, online))


def header_key(request: web.Request) -> str:
    """Return the API key in a request's headers, or ""."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    key = bearer.strip() if scheme.lower() == "bearer" else ""
    return key or request.headers.get("x-api-key", "")


def reward(online: OnlineSessions, request: web.Request, body: Any) -> web.Response | None:
    """Reward the latest session of a key and answer; return None for an unknown key."""
    if (state := online.current(key_of(request))) is None:
        return None
    data = dialects.checked_fields(body, {"reward": None, "completion_id": str})
    value = data.get("reward")
    if name := data.get("completion_id"):
        value = {name: value}
    if state.completions or not isinstance(value, Mapping):  # else it is too early
        if wrong := returns.mistake(value, state.completions, "the reward is"):
            raise ApiError(400, wrong, "reward")
        value = returns.plain(value)
    return web.json_response(public_view(online.reward(state.id, value)))


async def _make(online: OnlineSessions, request: web.Request) -> web.Response:
    _require_admin(online, request)
    body = dialects.parse(await request.read() or b"{}")
    data = dialects.checked_fields(body, {"task_id": str, "api_key": str})
    state, key = online.open(data.get("task_id", ""), data.get("api_key", ""))
    return web.json_response({**public_view(state), "api_key": key}, status=201)


async def _list(online: OnlineSessions, request: web.Request) -> web.Response:
    _require_admin(online, request)
    data = [public_view(state) for state in online.states.values()]
    return web.json_response({"object": "list", "data": data})


async def _export(online: OnlineSessions, request: web.Request) -> web.Response:
    _require_admin(online, request)
    name = request.match_info["id"]
    state = online.state(name)
    if state.slot < 0 or state.why:  # a training run takes its own sessions
        online.take(name, "exported", state.why)
    body = await online.export(name)
    return web.Response(body=body, content_type="application/json")


async def _end(online: OnlineSessions, request: web.Request) -> web.Response:
    state = online.current(key_of(request))
    return _view(online, request, state and online.end(state.id, "application"))


async def _refresh(online: OnlineSessions, request: web.Request) -> web.Response:
    return _view(online, request, online.refresh(key_of(request)))


def _view(online: OnlineSessions, request: web.Request, state: SessionState | None) -> web.Response:
    if state:
        return web.json_response(public_view(state))
    if (key := key_of(request)) and online.is_admin(key):
        raise ApiError(403, "the admin key has no session; use a session's key")
    raise unauthorized(key)


_OF_SESSIONS: Mapping[tuple[str, str], _Handler] = {
    ("POST", "/v1/session/end"): _end,
    ("POST", "/v1/session/refresh"): _refresh,
}
_ROUTES: Mapping[tuple[str, str], _Handler] = {
    ("POST", "/v1/sessions"): _make,
    ("GET", "/v1/sessions"): _list,
    ("GET", "/v1/sessions/{id}/trajectories"): _export,
    **_OF_SESSIONS,
}


def key_of(request: web.Request) -> str:
    """Return the API key in a request's address or headers, or ""."""
    return request.match_info.get("key") or header_key(request)


def _require_admin(online: OnlineSessions, request: web.Request) -> None:
    key = header_key(request)
    if online.is_admin(key):
        return
    if online.known(key):
        raise ApiError(403, "this is a session's API key; use the admin key")
    raise unauthorized(key)


def unauthorized(key: str) -> ApiError:
    """Return the refusal of an unknown or missing API key."""
    problem = "unknown API key" if key else "no API key"
    return ApiError(401, f"{problem}; send the key that you were given", code="invalid_api_key")

"""A small server of OpenAI's and Anthropic's APIs for tests, a process of its own.

The prompt says how it behaves: `{"status": 429}`, `{"drop": true}`, `{"together": 16}` (none is
answered before that many are there). /wrong/… answers without an API, /slow/… never.
"""

import asyncio
import itertools
import json

from aiohttp import web

KEY = "sk-real"
MODELS = ("tiny-model", "other-model")
_numbers = itertools.count()
_waiting = []  # requests that are answered with the last of those that come together


def refused(request, status=401, message="Incorrect API key provided."):
    """An error's answer where the key is wrong, or another status is asked for."""
    given = request.headers.get("x-api-key", request.headers.get("Authorization", ""))
    if given.removeprefix("Bearer ") == KEY and status == 401:
        return None
    return web.json_response({"error": {"message": message}}, status=status)


async def models(request):
    """The list."""
    return refused(request) or web.json_response({"data": [{"id": name} for name in MODELS]})


async def chat(request):
    """One completion of OpenAI's API, or message of Anthropic's."""
    if wrong := refused(request):
        return wrong
    body = await request.json()
    if body["model"] not in MODELS:
        return refused(request, 404, f"The model `{body['model']}` does not exist.")
    wish = json.loads(body["messages"][-1]["content"])
    if "together" in wish:
        _waiting.append(mine := asyncio.Event())
        if len(_waiting) == wish["together"]:
            while _waiting:
                _waiting.pop().set()
        await mine.wait()
    if wish.get("drop"):
        request.transport.close()
        return web.Response()
    if "status" in wish:
        return refused(request, wish["status"], f"refused, request {next(_numbers)}")
    name = f"made-{next(_numbers)}"
    if request.path.endswith("/messages"):
        text = {"type": "text", "text": "It is 42."}
        return web.json_response({
            "id": name, "type": "message", "role": "assistant", "model": body["model"],
            "content": [text], "stop_reason": "end_turn", "stop_sequence": None,
            "usage": {"input_tokens": 12, "output_tokens": 5},
        })  # fmt: skip
    made = {"id": name, "object": "chat.completion", "created": 1, "model": body["model"]}
    if not body.get("stream"):
        message = {"role": "assistant", "content": "It is 42."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({**made, "choices": [choice]})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece, reason in (("It is", None), (" 42.", None), ("", "stop")):
        choice = {"index": 0, "delta": {"content": piece}, "finish_reason": reason}
        event = {**made, "object": "chat.completion.chunk", "choices": [choice]}
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await asyncio.sleep(0.2)  # the end comes later than the last event
    return response


async def never(request):
    """No answer."""
    await asyncio.sleep(3600)


async def page(request):
    """Something else than an API."""
    return web.Response(text="<html>Welcome</html>", content_type="text/html")


async def main():
    """Serve at a free port, which is printed."""
    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/v1/messages", chat)
    app.router.add_get("/slow/v1/models", never)
    app.router.add_get("/wrong/v1/models", page)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())

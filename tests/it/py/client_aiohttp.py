"""aiohttp with one session; it reads the proxy variables only when told to trust the environment."""
import asyncio

import aiohttp

import protocol

loop = asyncio.new_event_loop()


async def begin():
    return aiohttp.ClientSession(trust_env=True)


session = loop.run_until_complete(begin())


async def told(asked):
    async with asked as answer:
        return answer.status, answer.headers.get("Retry-After"), await answer.read()


try:
    protocol.main(
        lambda url: loop.run_until_complete(told(session.get(url))),
        lambda url, body: loop.run_until_complete(told(session.post(url, data=body))),
    )
finally:
    loop.run_until_complete(session.close())

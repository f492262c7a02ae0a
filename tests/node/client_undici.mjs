// undici's fetch with its EnvHttpProxyAgent.
import { main, require } from "./protocol.mjs";

const { EnvHttpProxyAgent, fetch } = require("undici");
const dispatcher = new EnvHttpProxyAgent();

async function told(answer) {
  return {
    status: answer.status,
    retryAfter: answer.headers.get("retry-after"),
    body: Buffer.from(await answer.arrayBuffer()),
  };
}

await main(
  async (url) => told(await fetch(url, { dispatcher })),
  async (url, body) => told(await fetch(url, { dispatcher, method: "POST", body })),
);

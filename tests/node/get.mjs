// Fetches one URL with undici and writes its body to stdout. Proxy and CA come from the environment.
//   node get.mjs FOLDER_WITH_NODE_MODULES URL
import { createRequire } from "node:module";

const [packages, url] = process.argv.slice(2);
const { EnvHttpProxyAgent, fetch } = createRequire(`${packages}/`)("undici");

const answer = await fetch(url, { dispatcher: new EnvHttpProxyAgent() });
if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
process.stdout.write(new Uint8Array(await answer.arrayBuffer()));

// What the Node clients have in common: `get URL...` one after the other, or `post URL LENGTH`. Prints a line for each
// answer: status, Retry-After or "-", SHA-256 of the body. Proxy and CA come from the environment.
//   node CLIENT.mjs FOLDER_WITH_NODE_MODULES get URL...
import { createHash } from "node:crypto";
import { createRequire } from "node:module";

const [packages, verb, ...rest] = process.argv.slice(2);
export const require = createRequire(`${packages}/`);

const pattern = (length) => Uint8Array.from({ length }, (_, n) => n % 251);

function say({ status, retryAfter, body }) {
  console.log(status, retryAfter ?? "-", createHash("sha256").update(body).digest("hex"));
}

export async function main(get, post) {
  if (verb === "get") {
    for (const url of rest) say(await get(url));
  } else {
    say(await post(rest[0], pattern(Number(rest[1]))));
  }
}

/**
 * A small gateway that lets the policy service decide: `model` of the request names the route, the service names the target,
 * and the answer of the target's upstream goes back.
 *
 *     node src/main.js gateway.json
 */
import { loadConfig } from "./config.js";
import { Gateway } from "./gateway.js";

const gateway = new Gateway(loadConfig(process.argv[2] ?? "gateway.json"));
gateway.listen();
for (const signal of ["SIGTERM", "SIGINT"]) {
  process.once(signal, async () => {
    await gateway.close();
    process.exit(0);
  });
}

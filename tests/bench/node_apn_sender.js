// Sends with @parse/node-apn for bench_peers: argv is one JSON object, output is one JSON line.
const options = JSON.parse(process.argv[2]);
const apn = require(options.package);

const provider = new apn.Provider({
  token: { key: options.key, keyId: options.key_id, teamId: options.team_id },
  production: true,
  address: '127.0.0.1',
  port: options.port,
  ca: options.ca,
  requestTimeout: 10000,
});

function notification(number) {
  const push = new apn.Notification();
  push.topic = 'org.example.app';
  push.pushType = 'background';
  push.priority = 5;
  push.collapseId = Buffer.from(String(number).padStart(33, '0')).toString('base64');
  push.contentAvailable = 1;
  push.payload = { topic: push.collapseId, sequence_id: String(number) };
  return push;
}

let next = 0;

async function sender(until) {
  while (next < until) {
    const number = next++;
    const result = await provider.send(notification(number), number.toString(16).padStart(64, '0'));
    if (result.sent.length !== 1) throw new Error(JSON.stringify(result.failed));
  }
}

async function sendAll(count) {
  next = 0;
  await Promise.all(Array.from({ length: options.in_flight }, () => sender(count)));
}

(async () => {
  await sendAll(2 * options.in_flight);
  const cpuBefore = process.cpuUsage();
  const before = process.hrtime.bigint();
  await sendAll(options.sends);
  const seconds = Number(process.hrtime.bigint() - before) / 1e9;
  const cpu = process.cpuUsage(cpuBefore);
  console.log(JSON.stringify({ seconds, cpu_s: (cpu.user + cpu.system) / 1e6 }));
  process.exit(0);
})();

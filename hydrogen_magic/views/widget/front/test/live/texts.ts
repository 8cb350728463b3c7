import type { Report } from "../../src/protocol";

export const report: Report = {
  rank: 2,
  is_raised: false,
  text: `rank 2 failed: ValueError: expected 10 classes, labels go up to 11        (cell 4, line 21)

  Cell 4, line 21, in <module>
       19         for x, y in shard:
       20             optimizer.zero_grad()
  ---> 21             loss = train_step(model, x, y)
       22             loss.backward()
       23             optimizer.step()

  Cell 3, line 8, in train_step(model, x, y)
        6     logits = model(x)
        7     if y.max() >= logits.shape[1]:
  ----> 8         raise ValueError(f"expected {logits.shape[1]} classes, labels go up to {y.max()}")
        9     return F.cross_entropy(logits, y)

ranks 0, 1 and 3 were stopped

last lines of rank 2:
  epoch 3 step 412 loss=0.8134
  \x1b[33mWARNING\x1b[0m loader: shard 17 has labels outside of [0, 10)`,
};

export const hostileLines = [
  "</script><img src=x onerror=\"document.title='owned'\">",
  "<script>document.title='owned'</script>",
  "\x1b[31mred\x1b[0m plain \x1b[1;32mbold green\x1b[0m \x1b[38;5;208morange\x1b[0m \x1b[48;5;226;30mon yellow\x1b[0m",
  "\x1b[38;2;255;255;0mtrue yellow\x1b[0m \x1b[7minverse\x1b[27m \x1b[4munderlined\x1b[0m",
  "\x1b]8;;javascript:alert(1)\x07link\x1b]8;;\x07",
  "[31mno escape",
  "javascript:alert(1) &lt;b&gt; &amp;",
  "x".repeat(400),
];

export function stacks(): Record<string, string> {
  const waiting = `MainThread
  File "torch/distributed/distributed_c10d.py", line 2806, in all_reduce
    work.wait()
  Cell 4, line 24, in <module>
    dist.all_reduce(total)`;
  const reading = `MainThread
  File "/usr/lib/python3.11/gzip.py", line 507, in read
    buf = self._fp.read(READ_BUFFER_SIZE)
  Cell 3, line 31, in shards
    rows = gzip.open(path).read()
  Cell 4, line 20, in <module>
    for x, y in shard:

Thread pin_memory
  File "torch/utils/data/_utils/pin_memory.py", line 36, in do_one_step
    r = in_queue.get(timeout=MP_STATUS_CHECK_INTERVAL)`;
  return { "0": waiting, "1": waiting, "2": reading, "3": waiting };
}

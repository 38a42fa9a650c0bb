"""The look of the status page. Colours are told apart by people who see fewer of them (Okabe and Ito's palette)."""

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5c6570; --line: #dde1e6; --ground: #f5f6f8; --card: #fff;
  --delivered: #0b7a5e; --suppressed: #9db7c9; --failed: #d55e00; --rejected: #b3261e; --mismatch: #8e5aa8;
  --dead: #6b7078; --good: #0b7a5e; --bad: #b3261e; --warn: #9a5b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa4af; --line: #2d343c; --ground: #12161a;
  --card: #1a1f25; --delivered: #35b08d; --suppressed: #5d7f96; --failed: #f08c3a; --rejected: #ee6a61;
  --mismatch: #bd8ad6; --dead: #8b929b; --good: #35b08d; --bad: #ee6a61; --warn: #e0a44a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); line-height: 1.45;
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 40px; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 16px; margin-bottom: 20px; }
h1 { font-size: 22px; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 15px; margin: 32px 0 10px; }
h3 { font-size: 15px; margin: 0; }
.soft, small { color: var(--soft); font-size: 13px; }
.pill { border-radius: 999px; padding: 2px 11px; font-size: 13px; border: 1px solid currentColor; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.tiles, .cards { display: grid; gap: 14px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); }
.cards { grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)); }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.tile p, .card p { margin: 0; }
.big { font-size: 26px; font-weight: 600; letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
.tile .big { overflow-wrap: anywhere; font-size: 20px; }
.tile h3 { font-weight: 400; }
.row { display: flex; justify-content: space-between; align-items: baseline; gap: 12px; }
.plot { display: block; width: 100%; margin-top: 8px; }
.wide { overflow-x: auto; }
.plot .ground { stroke: var(--line); fill: none; }
.plot .delivered { fill: var(--delivered); } .plot .suppressed { fill: var(--suppressed); }
.plot .failed { fill: var(--failed); } .plot .rejected { fill: var(--rejected); }
.plot .mismatch { fill: var(--mismatch); } .plot .dead { fill: var(--dead); }
.sent .plot { height: 68px; } .lost .plot { height: 30px; }
.axis { display: flex; justify-content: space-between; color: var(--soft); font-size: 12px; margin-top: 3px; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
.card .outcomes { margin-top: 12px; }
th { text-align: left; font-weight: 400; color: var(--soft); font-size: 13px; }
thead th { border-bottom: 1px solid var(--line); padding-bottom: 4px; }
td, th { padding: 3px 0 3px 14px; } td:first-child, th:first-child { padding-left: 0; }
.number { text-align: right; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
.key::before { content: ""; display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 8px;
  background: var(--colour); }
.key.delivered { --colour: var(--delivered); } .key.suppressed { --colour: var(--suppressed); }
.key.failed { --colour: var(--failed); } .key.rejected { --colour: var(--rejected); }
.key.mismatch { --colour: var(--mismatch); } .key.dead { --colour: var(--dead); }
.key { color: var(--ink); font-size: 14px; }
.nil { color: var(--soft); }
footer { margin-top: 32px; display: flex; flex-wrap: wrap; gap: 4px 18px; }
a { color: inherit; }
"""

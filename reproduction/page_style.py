"""How the report's page looks: on a wide screen, on a telephone, in the dark, on paper."""

# Sizes in rem, colours as variables: the dark page and the printed one only change those.
STYLE_SHEET = """
:root {
  color-scheme: light dark;
  --page: #fdfdfc; --ink: #1f2328; --soft: #5b626b; --line: #dcdedf; --panel: #f4f5f4; --link: #1f5a96;
  --yes: #17693f; --yes-panel: #e6f3eb; --no: #a32b22; --no-panel: #faeae8; --open: #5b626b; --open-panel: #eceeee;
  --serif: Charter, "Bitstream Charter", "Iowan Old Style", "Palatino Linotype", Georgia, "DejaVu Serif", serif;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #16181b; --ink: #e3e4e2; --soft: #a0a6ad; --line: #363a3f; --panel: #1f2226; --link: #8ab8ea;
    --yes: #74cf9b; --yes-panel: #1b3226; --no: #f3998f; --no-panel: #3d2321; --open: #a0a6ad; --open-panel: #2a2e33;
  }
  /* Paper turns into night, and colours keep their hue. */
  figure svg { filter: invert(.9) hue-rotate(180deg); }
  .drawing { background: #191919 !important; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; scroll-padding-top: 3rem; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 1.0625rem/1.6 var(--serif); overflow-wrap: break-word;
}
main { max-width: 64rem; margin: 0 auto; padding: 2rem 1.5rem 5rem; }
h1, h2 { line-height: 1.25; font-weight: 600; text-wrap: balance; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; max-width: 52rem; }
h2 { font-size: 1.4rem; margin: 0 0 .9rem; max-width: 46rem; }
p { margin: 0 0 1rem; max-width: 42rem; }
a { color: var(--link); text-decoration-thickness: .06em; text-underline-offset: .18em; }
code { font-family: var(--mono); font-size: .88em; overflow-wrap: anywhere; }
.kicker {
  margin-bottom: .4rem; font: 600 .8rem/1.4 var(--sans);
  letter-spacing: .08em; text-transform: uppercase; color: var(--soft);
}
.authors { color: var(--soft); margin-bottom: 1rem; }
.summary { font-size: 1.1rem; line-height: 1.5; }
#findings { margin-top: 1rem; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem; }
.pictures figure { flex: 1 1 20rem; max-width: 34rem; margin: .5rem 0 0; }
.pictures figcaption { font-size: .82rem; }

/* The contents stay in sight: a bar at the top, or a column where there is room. What is being read is marked by the
   browsers that can tell (no script is needed for that). */
nav {
  position: sticky; top: 0; z-index: 1; overflow-x: auto;
  background: var(--page); border-bottom: 1px solid var(--line); font: .9rem/1.4 var(--sans);
}
nav ol { display: flex; gap: .2rem; width: max-content; margin: 0 auto; padding: .3rem .75rem; list-style: none; }
nav a {
  display: block; padding: .3rem .6rem; border-radius: .3rem; color: var(--soft);
  text-decoration: none; white-space: nowrap;
}
nav a:hover { color: var(--link); }
/* A section is being read while it crosses a line a fifth below the top; that is the time of its link's animation. */
main > section { view-timeline-axis: block; view-timeline-inset: 20% 80%; }
nav a { animation: being-read linear; }
@keyframes being-read { from, to { color: var(--ink); background: var(--panel); } }
@media screen and (min-width: 84rem) {
  html { scroll-padding-top: 1rem; }
  body { display: grid; grid-template-columns: 13rem minmax(0, 1fr); }
  nav { top: 0; align-self: start; height: 100vh; padding-top: 3.5rem; border: 0; border-right: 1px solid var(--line); }
  nav ol { display: block; width: auto; margin: 0; padding: 0 1rem; }
  nav a { white-space: normal; }
}
@media screen and (min-width: 60rem) {
  #findings { display: grid; grid-template-columns: minmax(0, 24rem) minmax(0, 1fr); gap: 0 2.5rem; }
  .pictures { flex-direction: column; }
  .pictures figure { flex: none; margin: 0; }
}
.experiment { margin-top: 3.5rem; padding-top: 2.5rem; border-top: 1px solid var(--line); }

table { border-collapse: collapse; width: 100%; font: .9rem/1.5 var(--sans); }
th, td { text-align: left; vertical-align: top; padding: .55rem 1.1rem .55rem 0; border-bottom: 1px solid var(--line); }
th:last-child, td:last-child { padding-right: 0; }
th { font-weight: 600; color: var(--soft); }
thead th { border-bottom: 2px solid var(--line); }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.stacks td:nth-child(1) { width: 36%; }
.stacks td:nth-child(2), .stacks td:nth-child(3) { width: 27%; }
.stacks td:nth-child(4) { width: 10%; }
.wide { margin: .5rem 0 1rem; overflow-x: auto; }
.numbers { font-size: .82rem; }
.numbers th, .numbers td { padding: .25rem .7rem .25rem 0; white-space: nowrap; }
.pairs { width: auto; max-width: 100%; }
.pairs th { font-weight: 400; width: 1%; min-width: 8rem; max-width: 16rem; overflow-wrap: anywhere; }
.pairs th, .pairs td { padding-top: .3rem; padding-bottom: .3rem; }

.badge {
  display: inline-block; padding: .05em .6em; border: 1px solid currentColor; border-radius: 1em;
  font: 600 .8rem/1.5 var(--sans); white-space: nowrap;
}
.badge.yes { color: var(--yes); background: var(--yes-panel); }
.badge.no { color: var(--no); background: var(--no-panel); }
.badge.open { color: var(--open); background: var(--open-panel); }
blockquote { margin: 1.2rem 0 .6rem; padding: 0 0 0 1rem; max-width: 44rem; font-style: italic; color: var(--soft); }
blockquote p { margin: 0; }
.verdict {
  margin: 1rem 0; padding: .8rem 1.1rem; max-width: 46rem; background: var(--panel);
  border-left: .25rem solid var(--line); border-radius: 0 .3rem .3rem 0;
}
.verdict.yes { border-color: var(--yes); }
.verdict.no { border-color: var(--no); }
.verdict p { margin: 0 0 .4rem; }
.verdict .badge { margin-right: .4rem; }
.verdict dl { margin: 0; font: .9rem/1.5 var(--sans); }
.verdict dl div { display: flex; gap: .8rem; }
dt { flex: 0 0 5rem; color: var(--soft); }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }

figure { margin: 1.75rem 0; }
.drawing {
  max-width: calc(1.2 * var(--width)); padding: .5rem;
  background: #fff; border: 1px solid var(--line); border-radius: .3rem;
}
figure svg {
  display: block; width: 100%; height: auto; background: #fff;
  stroke-linejoin: round; stroke-linecap: butt;
}
figcaption { margin-top: .6rem; max-width: 46rem; font: .9rem/1.5 var(--sans); color: var(--soft); }
.files { white-space: nowrap; }
.files a + a { margin-left: .35rem; }
.data { font: .9rem/1.5 var(--sans); }
details { margin-top: 1rem; font-family: var(--sans); font-size: .9rem; }
summary { cursor: pointer; color: var(--soft); padding: .3rem 0; width: fit-content; }
details .pairs { margin: .3rem 0 1rem; font-size: .85rem; }
details .pairs th { min-width: 14rem; }
details > p { font: 1rem/1.6 var(--serif); margin-top: .6rem; }

@media screen and (max-width: 44rem) {
  body { font-size: 1rem; }
  main { padding: 1.2rem 1rem 3rem; }
  h1 { font-size: 1.35rem; }
  h2 { font-size: 1.25rem; }
  .summary { font-size: 1.05rem; }
  .drawing { padding: .2rem; }
  .stacks, .stacks tbody, .stacks tr, .stacks td { display: block; width: auto !important; }
  .stacks thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .stacks tr { padding: .7rem 0; border-bottom: 1px solid var(--line); }
  .stacks td { display: flex; gap: .8rem; padding: .15rem 0; border: 0; }
  .stacks td::before { content: attr(data-head); flex: 0 0 5.5rem; color: var(--soft); }
  .stacks td div { min-width: 0; }
  .pairs th { min-width: 5.5rem; max-width: 9rem; padding-right: .8rem; }
  details .pairs th { min-width: 8rem; }
}

@page { margin: 18mm 16mm; }
@media print {
  :root {
    color-scheme: light;
    --page: #fff; --ink: #000; --soft: #444; --line: #bbb; --panel: #fff; --link: #000;
    --yes: #17693f; --yes-panel: #fff; --no: #a32b22; --no-panel: #fff;
  }
  body { font-size: 10.5pt; line-height: 1.45; }
  main { max-width: none; padding: 0; }
  p, h1, h2, figcaption, .verdict { max-width: none; }
  h1 { font-size: 18pt; }
  h2 { font-size: 14pt; break-after: avoid; }
  table, .verdict dl, figcaption, .data, details .pairs { font-size: 9pt; }
  .numbers { font-size: 6.5pt; }
  .wide { overflow: visible; }
  section { margin-top: 1.5rem; }
  .experiment { margin-top: 2rem; padding-top: 1.2rem; }
  p { orphans: 3; widows: 3; }
  nav { display: none; }
  figure svg { filter: none; }
  .drawing { background: #fff !important; }
  figure, tr, .verdict { break-inside: avoid; }
  .summary { font-size: 11.5pt; }
  .pairs th, .pairs td { padding-top: .2rem; padding-bottom: .2rem; }
  .drawing { border: 0; padding: 0; max-width: calc(.8 * var(--width)); }
  figure svg { max-height: 20cm; }
  a { text-decoration: none; }
  .files { display: none; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""

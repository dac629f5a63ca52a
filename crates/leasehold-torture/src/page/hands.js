// Input: keys, mouse and touch. Also printing.


const KEYS = {
  ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), '+': () => zoom(0.6), '=': () => zoom(0.6), '-': () => zoom(1 / 0.6),
  '0': fit, Home: () => look(0, view.to - view.from), End: () => look(span - (view.to - view.from), span),
  n: () => showFault(1), p: () => showFault(-1), '[': () => step(-1), ']': () => step(1),
  v: () => data.violations.length && showViolation((view.violation + 1) % data.violations.length),
  Escape: () => select(null),
};
chart.addEventListener('keydown', event => {
  const act = KEYS[event.key];
  // The keys up and down scroll the lanes, as in every page.
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
});
chart.addEventListener('scroll', draw);
chart.addEventListener('wheel', event => {
  if (event.ctrlKey || event.metaKey) {
    zoom(Math.exp(Math.sign(event.deltaY) * 0.25), time(event.clientX - canvas.getBoundingClientRect().left));
  } else if (event.deltaX) {
    pan(event.deltaX / view.width);
  } else {
    return;
  }
  event.preventDefault();
}, { passive: false });
let grip = null;
canvas.addEventListener('pointerdown', event => {
  grip = { x: event.clientX, y: event.clientY, from: view.from, to: view.to, top: chart.scrollTop, moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener('pointermove', event => {
  if (!grip) return;
  grip.moved ||= Math.abs(event.clientX - grip.x) + Math.abs(event.clientY - grip.y) > 4;
  if (!grip.moved) return;
  const by = (grip.x - event.clientX) / (view.width - LABEL) * (grip.to - grip.from);
  chart.scrollTop = grip.top + grip.y - event.clientY;
  look(grip.from + by, grip.to + by);
});
canvas.addEventListener('pointerup', event => {
  if (grip && !grip.moved) select(under(event));
  grip = null;
});
// During a touch, the browser scrolls on its own.
canvas.addEventListener('pointercancel', () => { grip = null; });
for (const [id, act] of Object.entries({ fit, in: KEYS['+'], out: KEYS['-'], left: KEYS.ArrowLeft, right: KEYS.ArrowRight, before: KEYS.p, next: KEYS.n })) {
  $(id).addEventListener('click', act);
}
window.addEventListener('resize', draw);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { readColors(); draw(); });
window.addEventListener('beforeprint', () => {
  document.documentElement.classList.add('printing');
  $('report').open = true;
  readColors();
  paint(true);
});
window.addEventListener('afterprint', () => {
  document.documentElement.classList.remove('printing');
  readColors();
  paint();
});

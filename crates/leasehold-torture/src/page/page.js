// The rest of the page, and the start of the program.


function legend() {
  const entries = [['wait', 'waits'], ['hold', 'believes it holds'], ['doubt', 'may not hold'], ['pause', 'paused'], ['cut', 'cut off'], ['kill', 'killed'],
    ['servers', 'server down'], ['stall', 'process did not run'], ['taken', 'write accepted'], ['refused', '✕ write rejected'], ['lost', '● write lost, ○ write late']];
  for (const [name, what] of entries) {
    const entry = document.createElement('span'), patch = document.createElement('i');
    patch.style.background = `var(--${name})`;
    entry.append(patch, what);
    $('legend').append(entry);
  }
}

// A list of thousands would be slower than the chart.
const MOST_LISTED = 500;
function violations() {
  $('broken').hidden = data.violations.length === 0;
  data.violations.slice(0, MOST_LISTED).forEach((broken, index) => {
    const item = document.createElement('li'), link = document.createElement('a');
    link.href = `#v${index + 1}`;
    link.textContent = `${broken.name}: ${broken.what}`;
    // Also works a second time, when the address does not change.
    link.addEventListener('click', () => showViolation(index));
    item.append(link);
    $('violations').append(item);
  });
  const more = data.violations.length - MOST_LISTED;
  if (more > 0) {
    const item = document.createElement('li');
    item.textContent = `and ${more} more (press v in the chart)`;
    $('violations').append(item);
  }
}

// Follows the address: #v3 is the third violation, #t=1.5,2 the time from 1.5 to 2 ms.
function byAddress() {
  const violation = /^#v(\d+)$/.exec(location.hash), window = /^#t=([\d.]+),([\d.]+)$/.exec(location.hash);
  if (violation) showViolation(Number(violation[1]) - 1);
  if (window) look(Number(window[1]) * 1e3, Number(window[2]) * 1e3);
}

$('summary').textContent = data.summary;
$('summary').classList.add(data.verdict);
const VERDICT = { fine: 'PASS', violated: 'FAIL', void: 'INCONCLUSIVE' };
document.title = `${VERDICT[data.verdict]}: ${data.store}`;
if (data.command || data.seed) {
  $('again').hidden = false;
  $('command').textContent = data.command || `seed ${data.seed}`;
}
legend();
violations();
readColors();
// The chart is not higher than its lanes. The style limits its height.
chart.style.height = height + 4 + 'px';
// The canvas is as high as the frame, and sticks to it. This element after it makes the frame scroll.
$('height').style.height = Math.max(height - chart.clientHeight, 0) + 'px';
window.addEventListener('hashchange', byAddress);
fit();
paint();
byAddress();

// Keeps a page up to date. Without this script the pages are whole, and they load again every 30 seconds.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const COLOURS = {
  computing: "computing", transferring: "transferring", moving: "moving", waiting: "waiting", rate: "moving",
  open: "waiting", trouble: "trouble",
};
const FRESH_MS = 60000;
const AGAIN_MS = 15000;

// ---- times --------------------------------------------------------------------------------------------------------

// All times are of the access point's zone, as in the rest of the page. The server names its offsets from UTC.
const offsets = JSON.parse(document.body.dataset.offsets);
const there = (seconds) => {
  const [, offset] = offsets.reduce((found, one) => (one[0] <= seconds ? one : found), offsets[0]);
  return new Date((seconds + offset) * 1000);
};
const time = (seconds) => there(seconds).toISOString().slice(0, 19).replace("T", " ");

// A date whose fields in the browser's zone are those of the access point's: for the places of the ticks.
function shifted(seconds) {
  const date = there(seconds);
  return new Date(date.getUTCFullYear(), date.getUTCMonth(), date.getUTCDate(), date.getUTCHours(), date.getUTCMinutes(), date.getUTCSeconds());
}

function ticks(self, splits) {
  const isLong = splits[splits.length - 1] - splits[0] > 2 * 86400;
  return splits.map((at) => (isLong ? time(at).slice(5, 10) : time(at).slice(11, 16)));
}

// ---- charts -------------------------------------------------------------------------------------------------------

const charts = [];

async function startCharts() {
  const places = [...document.querySelectorAll("[data-chart]")];
  if (!places.length) return;
  const { default: UPlot } = await import(document.body.dataset.uplot);
  const fetched = new Map();
  for (const place of places) {
    const series = place.dataset.series.split(" ").map((text) => text.split("="));
    const found = await values(place, series, fetched);
    const chart = new UPlot(options(place, series), found, place);
    place.setAttribute("role", "img");
    place.setAttribute("aria-labelledby", `chart-${place.dataset.chart}-title`);
    charts.push({ chart, place, series });
    fillTable(place, series, found);
  }
  new ResizeObserver(() => charts.forEach(({ chart, place }) => {
    if (chart.width !== place.clientWidth) chart.setSize({ width: place.clientWidth, height: 200 });
  })).observe(document.querySelector("main"));
}

// Charts of one source share its answer, which "fetched" has.
async function values(place, series, fetched) {
  const source = place.dataset.source;
  if (!fetched.has(source)) fetched.set(source, fetch(source).then((answer) => answer.json()));
  const answer = await fetched.get(source);
  return [answer.values[0], ...series.map(([name]) => answer.values[answer.names.indexOf(name)])];
}

function options(place, series) {
  const axis = { stroke: colour("dim"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") } };
  const shown = (value) => short(value, place.dataset.unit);
  const size = (self, splits) => splits.map(shown);
  return {
    width: place.clientWidth, height: 200, cursor: { sync: { key: "time" } },
    scales: { y: { range: (self, least, most) => [0, Math.max(1, most * 1.1)] } },
    tzDate: shifted,
    axes: [{ ...axis, values: ticks }, { ...axis, values: size, size: place.dataset.unit ? 80 : 60 }],
    series: [{ label: "Time", value: (self, at) => (at ? time(at) : "--") }, ...series.map(([name, label]) => ({
      label, stroke: colour(COLOURS[name]), width: 2, fill: `${colour(COLOURS[name])}22`, value: (self, value) => shown(value),
    }))],
  };
}

// Powers of 1000, as in the rest of the page.
function short(value, unit = "") {
  if (value === null || value === undefined) return "";
  for (const [limit, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= limit) return `${(value / limit).toPrecision(3)} ${prefix}${unit}`;
  }
  return `${Math.round(value)} ${unit}`.trim();
}

function fillTable(place, series, found) {
  const target = document.querySelector(`[data-table="${place.dataset.chart}"]`);
  const table = document.createElement("table");
  const row = (cells, kind) => {
    const line = table.insertRow();
    cells.forEach((text, column) => {
      const cell = document.createElement(column && kind === "td" ? "td" : "th");
      cell.scope = kind === "th" ? "col" : "row";
      cell.textContent = text;
      line.append(cell);
    });
  };
  row(["Time", ...series.map(([, label]) => label)], "th");
  const step = Math.max(1, Math.floor(found[0].length / 30));
  for (let index = found[0].length - 1; index >= 0; index -= step) {
    row([time(found[0][index]), ...found.slice(1).map((one) => short(one[index], place.dataset.unit))], "td");
  }
  target.replaceChildren(table);
}

async function updateCharts() {
  const fetched = new Map();
  for (const { chart, place, series } of charts) {
    const found = await values(place, series, fetched);
    chart.setData(found);
    if (place.parentElement.querySelector("details").open) fillTable(place, series, found);
  }
}

// ---- grid of nodes ------------------------------------------------------------------------------------------------

const CONDITIONS = ["silent", "trouble", "full", "waiting", "moving", "idle"];

async function drawGrid() {
  const canvas = document.querySelector("[data-grid]");
  if (!canvas) return;
  const found = await (await fetch(canvas.dataset.grid)).json();
  const count = Math.max(1, found.names.length);
  const { clientWidth: width, clientHeight: height } = canvas.parentElement;
  let cell = 22;
  while (cell > 6 && Math.ceil(count / Math.floor(width / cell)) * cell > height) cell -= 1;
  const columns = Math.max(1, Math.floor(width / cell));
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = Math.ceil(count / columns) * cell * ratio;
  canvas.style.height = `${canvas.height / ratio}px`;
  const draw = canvas.getContext("2d");
  const colours = CONDITIONS.map(colour);
  draw.scale(ratio, ratio);
  found.conditions.forEach((condition, number) => {
    draw.fillStyle = colours[condition];
    draw.fillRect((number % columns) * cell, Math.floor(number / columns) * cell, cell - 1, cell - 1);
  });
  const nameAt = (event) => found.names[Math.floor(event.offsetY / cell) * columns + Math.floor(event.offsetX / cell)];
  canvas.onmousemove = (event) => { canvas.title = nameAt(event) || ""; };
  canvas.onclick = (event) => {
    const name = nameAt(event);
    if (name) location.href = `${canvas.dataset.node}?name=${encodeURIComponent(name)}`;
  };
}

// ---- countdowns ---------------------------------------------------------------------------------------------------

const received = new WeakMap();

// The page says how many seconds are left. The clock of this machine may be wrong, so only its progress counts.
function countDown() {
  for (const place of document.querySelectorAll("[data-left]")) {
    if (!received.has(place)) received.set(place, performance.now());
    const left = Math.ceil(place.dataset.left - (performance.now() - received.get(place)) / 1000);
    place.textContent = left > 0 ? `in ${clock(left)}` : "has ended";
  }
}

function clock(seconds) {
  const parts = [[Math.floor(seconds / 3600), "h"], [Math.floor(seconds / 60) % 60, "min"], [seconds % 60, "s"]];
  const first = parts.findIndex(([number]) => number > 0);
  return parts.slice(first).map(([number, unit], place) => `${place ? String(number).padStart(2, "0") : number} ${unit}`).join(" ");
}

// ---- live parts ---------------------------------------------------------------------------------------------------

async function updateParts() {
  if (!document.querySelector("[data-live]")) return;
  const answer = await fetch(location.href);
  if (!answer.ok) {
    warn(answer.status === 404 ? "This is no longer reported. The page shows its last state."
      : `The page cannot be updated (status ${answer.status}). It shows older figures.`);
    return;
  }
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  document.title = fresh.title;
  addCopyButtons(fresh);
  for (const id of ["problems", "updated", ...[...document.querySelectorAll("[data-live]")].map((part) => part.id)]) {
    replace(document.getElementById(id), fresh.getElementById(id));
  }
  countDown();
}

function warn(text) {
  const problem = document.createElement("div");
  problem.className = "problems";
  problem.textContent = text;
  const place = document.getElementById("problems");
  if (place.textContent !== text) place.replaceChildren(problem);
}

function replace(old, fresh) {
  if (!old || !fresh || old.innerHTML === fresh.innerHTML) return;
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  const scrolled = [...old.querySelectorAll(".scroll")].map((part) => part.scrollLeft);
  const place = focused && [...old.querySelectorAll(focused.tagName)].indexOf(focused);
  old.replaceChildren(...fresh.childNodes);
  [...old.querySelectorAll(".scroll")].forEach((part, number) => { part.scrollLeft = scrolled[number] || 0; });
  if (!focused) return;
  const again = [...old.querySelectorAll(focused.tagName)];
  const same = focused.href ? again.find((one) => one.href === focused.href) : again[place];
  if (same) same.focus({ preventScroll: true });
}

// Buttons are in a new part before it is compared with the old one. An equal part stays, with its focus and selection.
function addCopyButtons(page) {
  if (!navigator.clipboard) return;
  for (const command of page.querySelectorAll(".command")) {
    const button = page.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-label", `Copy ${command.textContent}`);
    command.after(button);
  }
}

document.addEventListener("click", async ({ target }) => {
  const command = target.tagName === "BUTTON" && target.previousElementSibling;
  if (!command || !command.matches(".command")) return;
  await navigator.clipboard.writeText(command.textContent);
  document.getElementById("connection").textContent = "Copied.";
});

function listen() {
  const connection = document.getElementById("connection");
  let events = null;
  let again = 0;
  let isBusy = false;
  let last = Date.now();
  const update = async () => {
    last = Date.now();
    if (connection.textContent) connection.textContent = "";
    if (isBusy || document.hidden) return;
    isBusy = true;
    try {
      await Promise.all([updateParts(), updateCharts(), drawGrid()]);
    } finally {
      isBusy = false;
    }
  };
  const open = () => {
    close();
    events = new EventSource(document.body.dataset.events);
    events.addEventListener("tick", update);
    // The browser tries again by itself, but not after an answer such as 503.
    events.onerror = () => {
      if (events.readyState === EventSource.CLOSED) again = setTimeout(open, AGAIN_MS);
    };
  };
  const close = () => {
    clearTimeout(again);
    if (events) events.close();
    events = null;
  };
  // A hidden page has no connection: browsers open few to one server.
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  if (!document.hidden) open();
  setInterval(() => {
    if (!document.hidden && Date.now() - last > FRESH_MS && !connection.textContent) {
      connection.textContent = "No connection to stageout-web: these figures are old.";
    }
  }, 5000);
}

addCopyButtons(document);
startCharts();
drawGrid();
countDown();
setInterval(countDown, 1000);
if (document.querySelector("[data-live]")) listen();

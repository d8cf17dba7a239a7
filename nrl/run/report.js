"use strict";
const SETTINGS = JSON.parse(document.getElementById("settings").textContent);
const { left: LEFT, top: TOP, bottom: BOTTOM } = SETTINGS;

// --- Numbers, by the rule of nrl.log.format_number

function formatNumber(value, noise = 1e-6, digits = 4) {
  if (value === null || !Number.isFinite(value)) return "undefined";
  if (value === 0 || Math.abs(value) < noise) return "0";
  const rounded = Math.abs(Number(value.toPrecision(digits)));
  if (rounded >= 1e3 && rounded < 1e6) return value.toLocaleString("en-US", { maximumFractionDigits: 0 }).replace("-", "−");
  for (const [scale, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"]]) {
    if (rounded >= scale && rounded < 1e15) return `${Number((value / scale).toPrecision(digits))}${unit}`.replace("-", "−");
  }
  const short = Number(value.toPrecision(digits));
  const text = rounded < 1e-4 || rounded >= 1e15 ? short.toExponential().replace("e+", "e") : String(short);
  return text.replaceAll("-", "−");
}

// --- Charts: wherever the pointer is in one, all charts of that loop say what they have at that step

const numbers = text => (text ? text.split(" ") : []).map(Number);

function prepareChart(svg) {
  const data = svg.dataset, figure = svg.closest("figure");
  const [low, high] = numbers(data.range);
  const chart = {
    svg, low, high, right: Number(data.right), noise: Number(data.noise), steps: numbers(data.steps),
    series: data.series.split(";").map(numbers), labels: data.labels.split(";"),
    unit: data.unit ? " " + data.unit : "", cursor: svg.querySelector(".cursor"), output: figure.querySelector("output"),
  };
  if (data.kind === "heat") {
    chart.bins = numbers(data.bins);
    chart.shares = data.shares.split(";").map(numbers);
  }
  chart.before = chart.output.textContent;
  return chart;
}

function nearestStep(steps, step) {
  let first = 0, last = steps.length - 1;
  while (last - first > 1) {
    const middle = (first + last) >> 1;
    if (steps[middle] <= step) first = middle; else last = middle;
  }
  return step - steps[first] < steps[last] - step ? first : last;
}

function showValues(chart, step, height) {
  const place = nearestStep(chart.steps, step), at = chart.steps[place];
  const across = LEFT + (at - chart.low) / (chart.high - chart.low) * (chart.right - LEFT);
  chart.cursor.setAttribute("transform", `translate(${across.toFixed(1)} 0)`);
  chart.cursor.style.visibility = "visible";
  const texts = chart.series.map((values, i) =>
    `${chart.labels[i]} ${formatNumber(values[place], chart.noise, chart.unit ? 3 : 4)}${chart.unit}`.trim());
  let text = texts.join(" · ");
  if (chart.bins && height !== undefined) {
    const bin = Math.min(Math.max(Math.floor((BOTTOM - height) / (BOTTOM - TOP) * (chart.bins.length - 1)), 0), chart.bins.length - 2);
    const share = formatNumber(chart.shares[place][bin]);
    text = `${formatNumber(chart.bins[bin])} to ${formatNumber(chart.bins[bin + 1])}: ${share} %`;
  }
  chart.output.textContent = `step ${at} · ${text}`;
}

for (const section of document.querySelectorAll(".loop")) {
  const charts = [...section.querySelectorAll("svg")].map(prepareChart);
  for (const chart of charts) {
    chart.svg.addEventListener("pointermove", event => {
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.svg.getScreenCTM().inverse());
      const share = Math.min(Math.max((point.x - LEFT) / (chart.right - LEFT), 0), 1);
      const step = chart.low + share * (chart.high - chart.low);
      for (const other of charts) showValues(other, step, other === chart ? point.y : undefined);
    });
    chart.svg.addEventListener("pointerleave", () => {
      for (const other of charts) {
        other.cursor.style.visibility = "hidden";
        other.output.textContent = other.before;
      }
    });
  }
}

// --- Elements. Texts of models only ever become text nodes.

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children.filter(child => child !== null && child !== ""));
  return made;
}

const HIDDEN = new RegExp(SETTINGS.hidden, "gu");
const SIGNS = { "\n": "↵", "\t": "⇥", "\r": "␍" };

/** A text with a sign for each invisible character; a line break gets a sign and stays. */
function visible(text) {
  const made = document.createDocumentFragment();
  let end = 0;
  for (const found of text.matchAll(HIDDEN)) {
    const character = found[0], code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    made.append(text.slice(end, found.index), element("i", "", SIGNS[character] ?? `U+${code}`));
    if (character === "\n" || character === "\t") made.append(character);
    end = found.index + character.length;
  }
  made.append(text.slice(end));
  return made;
}

const count = (number, noun) => `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;

function leftOut(number, noun) {
  return number ? element("span", "left-out", `… ${count(number, noun)} ${number === 1 ? "is" : "are"} not shown …`) : "";
}

function ends([first, number, last]) {
  return [visible(first), leftOut(number, "character"), visible(last)];
}

function facts(pairs, className = "") {
  return pairs.flatMap(([key, value]) => [element("span", className, visible(key), " ", element("b", "", visible(value))), " "]);
}

function flagElement(flag) {
  return element("span", flag === "right" ? "flag right" : "flag", visible(flag));
}

const valueAt = (column, place) => (Array.isArray(column) ? column[place] : column);

function tokenElement(run, place, part, peak) {
  const trained = valueAt(run.trained, place), advantage = valueAt(run.advantages, place);
  const sign = trained && advantage ? (advantage > 0 ? "positive" : "negative") : "";
  const made = element("span", ["t", trained ? "" : "given", sign].filter(Boolean).join(" "), visible(run.texts[place]));
  const logprob = ` · logprob ${formatNumber(valueAt(run.logprobs, place))}`;
  made.title = trained
    ? `advantage ${formatNumber(advantage)}${logprob}`
    : part.other + (part.other === "not sampled" ? "" : logprob);
  if (sign) made.style.setProperty("--strength", (0.15 + 0.6 * Math.abs(advantage) / peak).toFixed(3));
  return made;
}

function messageElement([role, text]) {
  return element("div", "message", element("b", role === "tool" ? "tool" : "", visible(role)), ...ends(text));
}

function messages(part) {
  const [first, number, last] = part.messages;
  if (!first.length) return ends(part.text);
  return [...first.map(messageElement), leftOut(number, "message"), ...last.map(messageElement)];
}

function turnElement(part, peak) {
  const who = element("div", "who", element("span", "", element("b", "", part.turn ? `turn ${part.turn}` : "policy")));
  if (part.reward) who.append(element("span", "reward", "reward ", element("b", "", visible(part.reward))));
  for (const [key, value] of part.components) who.append(element("span", "component", visible(key), " ", element("b", "", visible(value))));
  if (part.reasoning) {
    const reasoning = element("span", "", `reasoning ${part.reasoning.toLocaleString("en-US")}`);
    reasoning.title = "characters of reasoning";
    who.append(reasoning);
  }
  const text = element("div", "text");
  if (part.tokens) {
    const [first, number, last] = part.tokens;
    const tokens = run => run.texts.map((_, place) => tokenElement(run, place, part, peak));
    text.append(...tokens(first), leftOut(number, "token"), ...tokens(last));
  } else {
    text.append(...ends(part.text));
  }
  for (const [name, args] of part.calls) {
    text.append(element("div", "call", element("b", "", "call"), visible(name), "(", ...ends(args), ")"));
  }
  for (const [cut, reason] of part.malformed) {
    text.append(element("div", "call malformed", element("b", "", "malformed"), ...ends(cut), " ", element("span", "quiet", visible(reason))));
  }
  return element("div", "part policy", who, text);
}

function partElement(part, peak) {
  if (part.role === "gap") {
    return element("div", "part gap", element("div", "who"), element("div", "text", leftOut(part.left_out, "token")));
  }
  if (part.role === "policy") return turnElement(part, peak);
  const asked = part.role === "prompt";
  return element("div", `part ${asked ? "asked" : "answered"}`,
    element("div", "who", element("span", "", asked ? "prompt" : "environment")),
    element("div", `text ${asked ? "prompt" : "environment"}`, ...messages(part)));
}

function rowElement(row, last, peak) {
  const fork = row.fork;
  const made = element("div", ["card row", fork ? "forked" : "", fork?.first ? "first" : "", fork && last ? "last" : ""].filter(Boolean).join(" "));
  if (fork) {
    const reason = fork.why ? ` (${fork.why})` : "";
    const text = fork.first
      ? `episode ${fork.episode}, which forked: its first row`
      : `episode ${fork.episode}, fork ${fork.fork} of ${fork.forks}${reason}: its first ${fork.shared} tokens are those of a row before`;
    made.append(element("div", "of-episode", visible(text)));
  }
  const line = element("div", "facts", ...facts(row.facts), ...row.flags.flatMap(flag => [flagElement(flag), " "]));
  for (const [what, pairs] of row.more) {
    const label = what === "components" ? "reward of" : what === "env" ? "environment" : what;
    line.append(element("span", `own ${what}`, element("span", "of", label), " ", ...facts(pairs)));
  }
  const conversation = element("div", "conversation", ...row.parts.map(part => partElement(part, peak)));
  conversation.tabIndex = 0; // so that the keyboard scrolls it
  made.append(line, conversation);
  return made;
}

/** The rows of an episode; those of one that forked hang together. */
function sampleElements(sample, peak) {
  const made = sample.rows.map((row, place) => rowElement(row, place === sample.rows.length - 1, peak));
  if (sample.left_out) {
    const verb = sample.left_out === 1 ? "is" : "are";
    const note = element("p", "quiet", `… ${count(sample.left_out, "row")} of this episode ${verb} not shown …`);
    made.splice(3, 0, note);
  }
  return made;
}

function headElement(head) {
  return element("div", "card row head",
    element("div", "facts", ...facts(head.facts)),
    element("div", "conversation", ...head.parts.map(([label, part]) =>
      element("div", "part asked", element("div", "who", element("span", "", label)), element("div", "text prompt", ...messages(part))))));
}

function textOf(sample, head) {
  const found = [];
  const add = value => {
    if (typeof value === "string") found.push(value);
    else if (Array.isArray(value)) value.forEach(add);
  };
  const addParts = parts => {
    for (const part of parts) {
      if (part.tokens) found.push(part.tokens[0].texts.join("") + part.tokens[2].texts.join(""));
      else add(part.text?.filter(piece => typeof piece === "string"));
      add(part.messages);
      add(part.calls);
      add(part.malformed);
    }
  };
  for (const row of sample.rows) {
    add(row.facts);
    addParts(row.parts);
  }
  if (head) addParts(head.parts.map(([, part]) => part));
  return found.join("\n").toLowerCase();
}

// --- The browser of samples

const waitingFor = new Map(); // from the name of a file to what takes its content
let controls = 0;

/** Called by the files beside the page. */
window.nrlSamples = (name, part, content) => waitingFor.get(`${name}-${part}`)?.(content);

function loadFile(beside, part) {
  const key = `${beside.name}-${part}`;
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    const end = action => value => {
      waitingFor.delete(key);
      script.remove();
      action(value);
    };
    waitingFor.set(key, end(resolve));
    script.onerror = end(reject);
    script.src = `${beside.folder}/${key}.js`;
    document.head.append(script);
  });
}

class Samples {
  constructor(section, data) {
    this.section = section;
    this.data = data;
    this.unit = data.unit;
    this.within = data.within;
    this.chunks = new Map(); // the last few that were loaded
    this.change = 0; // counts changes of the filters, so that an earlier search ends
    this.at = 0;
    this.matches = [];
    this.useWithin();
    this.buildControls();
    if (data.beside) this.loadIndex();
    else this.filter();
  }

  useWithin() {
    this.labels = this.data.labels;
    this.sources = this.data.sources;
    this.entries = this.within.samples.map((sample, place) => ({ ...sample, rows: null, chunk: -1, place }));
  }

  async loadIndex() {
    this.filter();
    try {
      const index = await loadFile(this.data.beside, "index");
      const entries = [];
      let chunk = 0, place = 0;
      for (let i = 0; i < index.step.length; i++, place++) {
        while (place === index.counts[chunk]) chunk++, place = 0;
        const entry = { step: index.step[i], group: index.group[i], source: index.source[i], reward: index.reward[i] };
        entries.push(Object.assign(entry, { flags: index.flags[i], chunk, place }));
      }
      this.entries = entries;
      this.at = 0;
    } catch {
      this.missing = true;
    }
    this.filter();
  }

  /** The samples and heads of a chunk; chunk −1 is within the page. */
  chunk(number) {
    if (number < 0) return this.within;
    const loaded = this.chunks.get(number) ?? loadFile(this.data.beside, number);
    loaded.catch(() => this.chunks.delete(number)); // the next look tries again
    this.chunks.delete(number);
    this.chunks.set(number, loaded);
    if (this.chunks.size > 8) this.chunks.delete(this.chunks.keys().next().value);
    return loaded;
  }

  buildControls() {
    const form = element("form", "filters");
    form.setAttribute("role", "search");
    form.addEventListener("submit", event => event.preventDefault());
    this.fields = {};
    const add = (name, label, field, spoken = label) => {
      field.id = `filter-${controls++}`;
      field.name = name;
      const text = element("label", "", label);
      text.htmlFor = field.id;
      field.setAttribute("aria-label", spoken);
      form.append(element("span", "field", text, field));
      this.fields[name] = field;
      field.addEventListener("input", () => this.filter(true));
    };
    const number = () => Object.assign(document.createElement("input"), { type: "number", step: "any" });
    const select = options => {
      const field = document.createElement("select");
      for (const [value, text] of options) field.append(Object.assign(new Option(), { value, textContent: text }));
      return field;
    };
    add("first", `${this.unit} from`, number());
    add("last", "to", number(), `${this.unit} to`);
    if (this.sources.length > 1) add("source", "source", select([["", "all"], ...this.sources.map((name, i) => [i, name || "none"])]));
    add("low", "reward from", number());
    add("high", "to", number(), "reward to");
    const flags = [["", "all"], ...this.labels.map((label, i) => [`+${i}`, label])];
    for (const [label, text] of [["invalid", "valid"], ["truncated", "not truncated"]]) {
      if (this.labels.includes(label)) flags.push([`-${this.labels.indexOf(label)}`, text]);
    }
    if (this.labels.length) add("flag", "show", select(flags));
    add("text", "search", Object.assign(document.createElement("input"), { type: "search" }));
    add("size", "per page", select([8, 20, 50].map(size => [size, String(size)])));
    this.status = element("output", "status");
    this.status.setAttribute("aria-live", "polite");
    this.note = element("p", "quiet note");
    this.pager = element("div", "pager");
    this.pager.setAttribute("role", "group");
    this.pager.setAttribute("aria-label", "Pages");
    const jump = (text, label, move) => {
      const button = element("button", "", text);
      button.type = "button";
      button.setAttribute("aria-label", label);
      button.title = label;
      button.addEventListener("click", () => { this.at = move(); this.show(); });
      this.pager.append(button);
    };
    const size = () => Number(this.fields.size.value);
    jump(`« ${this.unit}`, `previous ${this.unit}`, () => this.neighbour(-1, false));
    if (this.unit === "step") jump("« group", "previous group", () => this.neighbour(-1, true));
    jump("‹ page", "previous page", () => Math.max(0, this.at - size()));
    jump("page ›", "next page", () => (this.at + size() < this.matches.length ? this.at + size() : this.at));
    if (this.unit === "step") jump("group »", "next group", () => this.neighbour(1, true));
    jump(`${this.unit} »`, `next ${this.unit}`, () => this.neighbour(1, false));
    this.pager.append(this.status);
    this.list = element("div", "list");
    const legend = element("div", "legend", "advantage of a token: ", element("span", "", formatNumber(-this.data.peak)),
      element("span", "ramp"), element("span", "", formatNumber(this.data.peak)),
      element("span", "", "· grey: what was not sampled, or not trained on · point at a token for its numbers"));
    this.section.append(form, this.note, this.pager, ...(this.unit === "step" ? [legend] : []), this.list);
  }

  /** Where the next or the previous step begins, or group, among the matches. */
  neighbour(direction, group) {
    const entries = this.matches, own = entry => (group ? `${entry.step} ${entry.group}` : String(entry.step));
    const begin = at => {
      while (at > 0 && own(entries[at - 1]) === own(entries[at])) at--;
      return at;
    };
    if (!entries.length) return 0;
    const first = begin(this.at);
    if (direction < 0) return first < this.at || first === 0 ? first : begin(first - 1);
    let at = this.at;
    while (at < entries.length && own(entries[at]) === own(entries[this.at])) at++;
    return at < entries.length ? at : this.at;
  }

  accepts() {
    const value = name => this.fields[name]?.value ?? "";
    const bound = (name, none) => (value(name) === "" ? none : Number(value(name)));
    const [first, last, low, high] = [bound("first", -Infinity), bound("last", Infinity), bound("low", -Infinity), bound("high", Infinity)];
    const rewards = value("low") !== "" || value("high") !== "";
    const source = value("source") === "" ? null : Number(value("source"));
    const flag = value("flag") === "" ? null : Number(value("flag").slice(1)), wanted = value("flag").startsWith("+");
    return entry => entry.step >= first && entry.step <= last && (source === null || entry.source === source)
      && (!rewards || (entry.reward !== null && entry.reward >= low && entry.reward <= high))
      && (flag === null || entry.flags.includes(flag) === wanted);
  }

  async filter(begin = false) {
    const change = ++this.change, chosen = this.entries.filter(this.accepts());
    const text = this.fields.text.value.toLowerCase();
    if (begin) this.at = 0;
    this.searched = null;
    if (!text) {
      this.matches = chosen;
      return this.show();
    }
    this.matches = [];
    let shown = false, loaded = null, chunk;
    for (let i = 0; i < chosen.length; i++) {
      const { chunk: number, place } = chosen[i];
      if (number !== loaded) {
        this.searched = i;
        this.tell();
        try {
          chunk = await this.chunk(number);
        } catch {
          this.broken = true;
          break;
        }
        if (change !== this.change) return;
        loaded = number;
      }
      const sample = chunk.samples[place];
      if (textOf(sample, chunk.heads[sample.head]).includes(text)) this.matches.push(chosen[i]);
      if (!shown && this.matches.length >= Number(this.fields.size.value)) {
        shown = true;
        await this.show();
        if (change !== this.change) return;
      }
    }
    this.searched = null;
    if (shown) this.tell(); else await this.show();
  }

  tell() {
    const total = this.matches.length, noun = this.unit === "task" ? "answer" : "sample";
    const last = Math.min(this.at + Number(this.fields.size.value), total);
    const range = total ? `${(this.at + 1).toLocaleString("en-US")}–${last.toLocaleString("en-US")} of ` : "";
    const searching = this.searched === null ? "" : `, ${this.searched.toLocaleString("en-US")} searched so far`;
    this.status.textContent = `${range}${count(total, noun)}${searching}`;
    const notes = [], { beside, stride, file } = this.data;
    if (stride > 1) notes.push(`${file} is larger than 256 MB, so one of ${stride} ${noun}s is here; the others are in that file alone.`);
    if (beside && this.missing) {
      notes.push(`This page has an even selection of ${count(this.within.samples.length, noun)}. All ${this.data.total.toLocaleString("en-US")} were in the folder ${beside.folder}, which is not beside it; copy the folder along with the page.`);
    }
    if (this.broken) notes.push(`A file in ${beside.folder} could not be loaded; reload the page, or write the report again.`);
    this.note.textContent = notes.join(" ");
  }

  async show() {
    const change = this.change, shown = this.matches.slice(this.at, this.at + Number(this.fields.size.value));
    const showing = this.showing = (this.showing ?? 0) + 1;
    let elements = [];
    this.broken = false;
    try {
      let before = null;
      for (const entry of shown) {
        const chunk = await this.chunk(entry.chunk);
        const sample = chunk.samples[entry.place], head = chunk.heads[sample.head];
        const title = this.titleOf(entry);
        if (title !== before) elements.push(element("h4", "", title), head ? headElement(head) : "");
        before = title;
        elements.push(...sampleElements(sample, this.data.peak));
      }
    } catch {
      this.broken = true;
      elements = [];
    }
    if (change !== this.change || showing !== this.showing) return;
    this.list.replaceChildren(...elements.filter(child => child !== ""));
    this.tell();
  }

  titleOf(entry) {
    const unit = this.unit === "task" ? "Task" : "Step";
    const group = this.unit === "step" && entry.group !== "" ? ` · group ${entry.group}` : "";
    return `${unit} ${entry.step === null ? "undefined" : entry.step}${group}`;
  }
}

for (const section of document.querySelectorAll(".samples")) {
  new Samples(section, JSON.parse(section.querySelector("script").textContent));
}

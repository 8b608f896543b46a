"use strict";
// Draws rates, shows the tail of a stream, and keeps a page from refreshing under the person's hands.
// Text of records is set as text, never as HTML.
(() => {
  const $ = (id) => document.getElementById(id);

  // --- refreshing ---------------------------------------------------------------------------
  const refresh = $("refresh");
  if (refresh) {
    refresh.checked = sessionStorage.getItem("refresh") !== "no";
    refresh.addEventListener("change", () => sessionStorage.setItem("refresh", refresh.checked ? "yes" : "no"));
    document.body.addEventListener("htmx:beforeRequest", (event) => {
      const live = event.detail.elt;
      const marked = getSelection();
      const busy = live.contains(document.activeElement) || live.querySelector("details[open]")
        || (!marked.isCollapsed && marked.containsNode(live, true));
      if (!refresh.checked || document.hidden || busy) event.preventDefault();
    });
    // A phone shows a part of a wide table: what comes is scrolled to where the person has it.
    const tables = () => [...document.querySelectorAll(".table")];
    const nameOf = (table, at, all) => table.ariaLabel + " " + all.slice(0, at).filter((each) => each.ariaLabel === table.ariaLabel).length;
    let places = new Map();
    document.body.addEventListener("htmx:beforeSwap", () => {
      places = new Map(tables().map((table, at, all) => [nameOf(table, at, all), [table.scrollLeft, table.scrollTop]]));
    });
    document.body.addEventListener("htmx:afterSwap", () => tables().forEach((table, at, all) => {
      [table.scrollLeft, table.scrollTop] = places.get(nameOf(table, at, all)) ?? [0, 0];
    }));
  }

  // --- rates --------------------------------------------------------------------------------
  const short = (value) => {
    for (const [least, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (value >= least) return (value / least).toPrecision(3) + unit;
    return value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1);
  };
  const plots = $("plots");
  if (plots && window.uPlot) {
    const KEPT = 120;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const clock = (seconds) => new Date(seconds * 1000).toISOString().slice(11, 19);
    const times = [];
    const series = {};
    const drawn = [...plots.querySelectorAll(".plot")].map((box) => {
      const names = box.dataset.plot.split(" ");
      names.forEach((name) => { series[name] = []; });
      const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
      const plot = new uPlot({
        width: box.clientWidth, height: 150, legend: { show: false }, cursor: { show: false },
        // The width is that of all times that are kept, also while there are few.
        scales: { x: { range: (self, low, high) => { const end = high || Date.now() / 1000; return [end - KEPT, end + 1]; } }, y: { range: (self, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
        axes: [{ ...axis, size: 28, values: (self, ticks) => ticks.map(clock) }, { ...axis, size: 48, values: (self, ticks) => ticks.map(short) }],
        series: [{}, { label: names[0], stroke: colour("--accent"), width: 2 },
          { label: names[1], stroke: colour("--second"), width: 2, dash: [6, 4] }],
      }, [[], [], []], box);
      new ResizeObserver(() => plot.setSize({ width: box.clientWidth, height: 150 })).observe(box);
      return { plot, names };
    });
    const state = $("plots-state");
    const source = new EventSource(plots.dataset.url);
    source.addEventListener("rates", (event) => {
      const rates = JSON.parse(event.data);
      times.push(rates.t);
      for (const name in series) {
        series[name].push(rates[name]);
        const shown = plots.querySelector(`[data-rate="${name}"]`);
        if (shown) shown.textContent = short(rates[name]);
      }
      if (times.length > KEPT) { times.shift(); for (const name in series) series[name].shift(); }
      for (const { plot, names } of drawn) plot.setData([times, series[names[0]], series[names[1]]]);
      state.textContent = "The last two minutes (UTC); the first of each pair is drawn whole, the second dashed.";
    });
    source.addEventListener("gone", (event) => { state.textContent = "The broker does not answer: " + JSON.parse(event.data); });
    source.onerror = () => { state.textContent = "The rates have stopped; trying again."; };
  }

  // --- the tail of a stream -----------------------------------------------------------------
  const tail = $("tail");
  if (tail) {
    const ROWS = 200;
    const rows = $("tail-rows"), state = $("tail-state"), button = $("tail-button");
    let source = null, shown = 0, skipped = 0;
    const say = (text) => { state.textContent = text; };
    const element = (tag, text, kind) => {
      const made = document.createElement(tag);
      made.textContent = text;
      if (kind) made.className = kind;
      return made;
    };
    const cell = (text, kind) => element("td", text, kind);
    const marked = (text, marks) => {
      const made = cell(text);
      for (const mark of marks) made.append(" ", element("span", mark, "key"));
      return made;
    };
    const put = (row) => {
      rows.prepend(row);
      while (rows.childElementCount > ROWS) rows.lastElementChild.remove();
    };
    const gap = (text) => {
      const row = document.createElement("tr");
      const made = cell(text);
      made.colSpan = 5;
      row.className = "gap";
      row.append(made);
      put(row);
    };
    const passed = (count) => {
      if (!count) return;
      skipped += count;
      gap(count.toLocaleString("en") + " more came than can be shown");
    };
    const stop = (text) => {
      if (source) source.close();
      source = null;
      button.textContent = "Start";
      say(text);
    };
    tail.addEventListener("submit", (event) => {
      event.preventDefault();
      if (source) { stop("Stopped."); return; }
      const pattern = tail.elements.pattern.value;
      rows.replaceChildren();
      shown = skipped = 0;
      source = new EventSource(tail.dataset.url + "&pattern=" + encodeURIComponent(pattern));
      button.textContent = "Stop";
      say("Beginning.");
      source.addEventListener("begun", (event) => {
        const begun = JSON.parse(event.data);
        passed(begun.skipped);
        if (!shown) say("Following from offset " + begun.offset + ".");
      });
      source.addEventListener("records", (event) => {
        const came = JSON.parse(event.data);
        came.said.forEach(gap);
        passed(came.skipped);
        for (const record of came.rows) {
          const row = document.createElement("tr");
          const fields = Object.entries(record.fields).map(([name, value]) => name + "=" + value);
          row.append(cell(record.offset, "number"), cell(record.time, "time"),
            marked(record.subject, record.keys), marked("", fields), cell(record.body, "body"));
          put(row);
        }
        shown += came.rows.length;
        say(shown.toLocaleString("en") + " shown" + (skipped ? ", " + skipped.toLocaleString("en") + " passed over." : "."));
      });
      source.addEventListener("end", (event) => stop("Ended: " + JSON.parse(event.data)));
      source.onerror = () => { if (source && source.readyState === EventSource.CLOSED) stop("The console has ended the tail: log in again, or close other tails."); };
    });
  }
})();

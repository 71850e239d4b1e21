"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);

  function size(count) {
    const units = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
    for (const [name, unit] of units) {
      if (Math.abs(count) >= 0.9995 * unit) {
        const value = count / unit;
        return (Math.abs(value) < 999.5 ? Number(value.toPrecision(3)) : Math.round(value)) + " " + name;
      }
    }
    return count + " B";
  }

  function moment(time) {
    if (data.clock === "operators") return "operator " + Math.floor(time).toLocaleString("en");
    return time >= 1 ? time.toPrecision(4) + " s" : (1e3 * time).toPrecision(4) + " ms";
  }

  // The tree: its rows, and for each a node with its parent and children.
  const table = document.getElementById("tree");
  const rows = table ? Array.from(table.tBodies[0].rows) : [];
  const root = { children: [], depth: -1, open: true };
  const nodes = rows.map(function (row, index) {
    return { row: row, index: index, depth: Number(row.dataset.depth), children: [], open: true, shown: true };
  });
  const path = [root];
  for (const node of nodes) {
    while (path[path.length - 1].depth >= node.depth) path.pop();
    node.parent = path[path.length - 1];
    node.parent.children.push(node);
    path.push(node);
  }

  function setOpen(node, open) {
    node.open = open;
    const twist = node.row.querySelector(".twist");
    if (twist) twist.setAttribute("aria-expanded", String(open));
  }

  function show() {
    const walk = function (node, visible) {
      for (const child of node.children) {
        child.row.hidden = !(visible && child.shown);
        walk(child, visible && child.open);
      }
    };
    walk(root, true);
  }

  function sortBy(column, direction) {
    const numeric = column >= 2;
    const key = nodes.map(function (node) {
      const cell = node.row.cells[column];
      return numeric ? Number(cell.dataset.v) : cell.textContent;
    });
    const order = function (a, b) {
      if (!direction) return a.index - b.index;
      const x = key[a.index], y = key[b.index];
      const sign = numeric ? x - y : x.localeCompare(y, "en", { numeric: true });
      return direction * sign || a.index - b.index;
    };
    const sorted = document.createDocumentFragment();
    const walk = function (node) {
      for (const child of node.children.slice().sort(order)) {
        sorted.appendChild(child.row);
        walk(child);
      }
    };
    walk(root);
    table.tBodies[0].appendChild(sorted);
  }

  function filter(text) {
    const wanted = text.trim().toLowerCase();
    const walk = function (node, all) {
      let any = false;
      for (const child of node.children) {
        const words = child.row.dataset.name + " " + child.row.cells[1].textContent;
        const hit = all || words.toLowerCase().includes(wanted);
        const inside = walk(child, hit && child.depth > 0);
        child.shown = !wanted || hit || inside;
        if (wanted && inside) setOpen(child, true);
        any = any || hit || inside;
      }
      return any;
    };
    walk(root, false);
    show();
  }

  if (table) {
    const deepest = Number(table.dataset.closed);
    for (const node of nodes) {
      if (node.children.length) {
        node.row.className = "parent";
        setOpen(node, deepest < 0 || node.depth < deepest);
      }
    }
    show();
    table.tBodies[0].addEventListener("click", function (event) {
      const twist = event.target.closest(".twist");
      if (!twist) return;
      const node = nodes[rows.indexOf(twist.closest("tr"))];
      setOpen(node, !node.open);
      show();
    });
    const heads = Array.from(table.tHead.rows[0].cells);
    heads.forEach(function (head, column) {
      // Numbers begin with the largest, words with A. A third click restores the order of the model.
      const turns = column >= 2 ? ["descending", "ascending", "none"] : ["ascending", "descending", "none"];
      head.querySelector("button").addEventListener("click", function () {
        const next = turns[(turns.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
        for (const other of heads) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", next);
        sortBy(column, { descending: -1, ascending: 1, none: 0 }[next]);
      });
    });
    document.getElementById("filter").addEventListener("input", function (event) { filter(event.target.value); });
    for (const [id, open] of [["open", true], ["close", false]]) {
      document.getElementById(id).addEventListener("click", function () {
        const alone = root.children.length === 1;
        for (const node of nodes) {
          if (node.children.length) setOpen(node, open || (alone && node.depth === 0));
        }
        show();
      });
    }
  }

  // The chart: a read-out at the pointer, and the stretches of the module under the pointer in the tree.
  const chart = document.getElementById("chart");
  const svg = chart.querySelector("svg");
  const readout = document.getElementById("readout");
  const cursor = document.getElementById("cursor");
  const marked = document.getElementById("marked");
  const [left, right, top, bottom] = data.plot;
  const [first, last] = data.times;
  const toX = function (time) { return left + (time - first) / (last - first) * (right - left); };
  const toY = function (count) { return bottom - count / data.most * (bottom - top); };

  function countAt(time) {
    let low = 0, high = data.curve.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (data.curve[middle][0] <= time) low = middle; else high = middle - 1;
    }
    return data.curve[low][1];
  }

  function innermost(time) {
    let best = null;
    for (const stretch of data.stretches) {
      if (stretch[2] > time || stretch[3] < time) continue;
      const depth = nodes[stretch[0]].depth;
      if (!best || depth > best.depth) best = { depth: depth, stretch: stretch };
    }
    return best && best.stretch;
  }

  function line(tag, text) {
    const element = document.createElement(tag);
    element.textContent = text;
    readout.appendChild(element);
  }

  let now = first;
  function readAt(time) {
    if (!data.curve.length) return;
    now = Math.min(Math.max(time, first), last);
    const count = countAt(now), x = toX(now);
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("transform", "translate(" + x + " 0)");
    cursor.querySelector("circle").setAttribute("cy", toY(count));
    readout.textContent = "";
    line("b", size(count));
    line("span", moment(now));
    const phase = data.whole.find(function (one) { return one[1] <= now && now <= one[2]; });
    const stretch = innermost(now);
    if (stretch) {
      line("span", rows[stretch[0]].dataset.name || "(model)");
      line("span", rows[stretch[0]].cells[1].textContent + ", " + data.phases[stretch[1]]);
    } else if (phase) {
      line("span", data.phases[phase[0]]);
    }
    readout.hidden = false;
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    const at = x * scale;
    const turn = at - chart.scrollLeft > chart.clientWidth / 2;
    readout.style.left = (turn ? at - readout.offsetWidth - 14 : at + 14) + "px";
  }

  function hide() {
    readout.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  }

  svg.addEventListener("pointermove", function (event) {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    if (x < left - 8 || x > right + 8) hide();
    else readAt(first + (x - left) / (right - left) * (last - first));
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", function (event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    readAt(now + step * (last - first) / (event.shiftKey ? 20 : 200));
  });

  function mark(index) {
    marked.textContent = "";
    for (const stretch of data.stretches) {
      if (stretch[0] !== index) continue;
      const x = toX(stretch[2]), rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      rect.setAttribute("x", x);
      rect.setAttribute("y", top);
      rect.setAttribute("width", Math.max(toX(stretch[3]) - x, 1.5));
      rect.setAttribute("height", svg.viewBox.baseVal.height - 42 - top);
      marked.appendChild(rect);
    }
  }
  if (table) {
    table.tBodies[0].addEventListener("pointerover", function (event) {
      const row = event.target.closest("tr");
      if (row) mark(rows.indexOf(row));
    });
    table.tBodies[0].addEventListener("pointerleave", function () { marked.textContent = ""; });
  }
})();

// SPDX-License-Identifier: GPL-3.0-or-later
// Draws grafana/dashboards/kv-cache.json from a Prometheus, without a Grafana server: ?minutes=15&var-role=decode
import { initPluginTranslations } from '@grafana/i18n';
import { GlobalStyles, ThemeContext } from '@grafana/ui';
import React, { useEffect, useMemo, useState } from 'react';
import { createRoot } from 'react-dom/client';
import dashboard from '../../grafana/dashboards/kv-cache.json';
import { Panel, theme } from './panel.jsx';
import { variables } from './prometheus.js';

const WIDTH = 1600, COLUMNS = 24, ROW = 38, GAP = 8, TOP = 48;
const REFRESH_MS = 30e3;
const address = new URLSearchParams(location.search);
const minutes = Number(address.get('minutes') ?? 15);

const rangeNow = () => ({ from: Date.now() - minutes * 60e3, to: Date.now() });

function Page() {
  const [range, setRange] = useState(rangeNow);
  useEffect(() => {
    const timer = setInterval(() => setRange(rangeNow()), REFRESH_MS);
    return () => clearInterval(timer);
  }, []);
  const chosen = useMemo(() => variables(dashboard, address, range), [range]);
  const bottom = Math.max(...dashboard.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  return (
    <main style={{ position: 'relative', width: WIDTH, height: TOP + bottom * ROW }}>
      <h3 style={{ padding: GAP }}>{dashboard.title}, last {minutes} minutes</h3>
      {dashboard.panels.map((panel) => {
        const { x, y, w, h } = panel.gridPos;
        const width = (w * WIDTH) / COLUMNS - GAP;
        return (
          <div key={panel.id} style={{ position: 'absolute', left: (x * WIDTH) / COLUMNS, top: TOP + y * ROW, width }}>
            <Panel panel={panel} range={range} variables={chosen} width={width} height={h * ROW - GAP} />
          </div>
        );
      })}
    </main>
  );
}

await initPluginTranslations('sglang-dashboard'); // the components translate while they draw
createRoot(document.getElementById('root')).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles hackNoBackdropBlur isExtensionSidebarOpen={false} />
    <Page />
  </ThemeContext.Provider>,
);

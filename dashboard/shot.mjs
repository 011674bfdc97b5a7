// SPDX-License-Identifier: GPL-3.0-or-later
// node shot.mjs URL PICTURE.png: draws the page in headless Chromium, prints one JSON line a panel, saves the picture.
// Exit status 1 when a panel is in error, or has no data and its dashboard does not say why that may be.
import { chromium } from 'playwright-core';

const [url, picture] = process.argv.slice(2);
if (!picture) {
  console.error('usage: node shot.mjs URL PICTURE.png');
  process.exit(2);
}
const QUIET = ['--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync', '--disable-quic'];
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM || '/usr/bin/chromium',
  args: ['--no-sandbox', '--disable-gpu', ...QUIET],
});
const page = await browser.newPage({ viewport: { width: 1600, height: 900 } });
const complaints = [];
page.on('pageerror', (error) => complaints.push(error.message));
page.on('console', (message) => message.type() === 'error' && console.error(message.text().slice(0, 300)));
await page.goto(url);
await page.waitForFunction(() => {
  const panels = [...document.querySelectorAll('.panel')];
  return panels.length > 0 && panels.every((panel) => panel.dataset.state !== 'loading');
}, null, { timeout: 60000 });
await page.waitForTimeout(2000); // the canvases are drawn after the data is there
const panels = await page.$$eval('.panel', (all) => all.map((panel) => ({
  ...panel.dataset,
  canvases: panel.querySelectorAll('canvas').length,
  text: panel.innerText.replace(/\s+/g, ' ').slice(0, 400),
})));
await page.screenshot({ path: picture, fullPage: true });
await browser.close();

for (const panel of panels) console.log(JSON.stringify(panel));
const wrong = panels.filter(({ state, novalue }) => state === 'error' || (state === 'nodata' && novalue === 'No data'));
for (const { title, state, error } of wrong) console.error(`${title}: ${state} ${error}`);
for (const complaint of complaints) console.error(`page: ${complaint}`);
process.exit(wrong.length || complaints.length ? 1 : 0);

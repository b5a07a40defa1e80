//! Which operator or hub limits a flow, in the words of an observer. Each flow has the machine to itself: see `ALONE`.

mod planted;
mod unknown;

use tokio::sync::Mutex;

/// Held while a flow is observed: where its time goes must not depend on the other tests.
static ALONE: Mutex<()> = Mutex::const_new(());

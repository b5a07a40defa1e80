//! Hostile wakers that wait for memory, a condition or a blank envelope: they panic when woken or dropped, call back into
//! wakeline, or drop buffers. The other waiters resolve, and no panic leaves a destructor.

#[forbid(unsafe_code)]
mod waits;
